"""The sampled softmax's tables, sharded: N workers equal one process on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallax
from parallax.nn import SampledSoftmaxLoss
from tests.support.parity import assert_same, share
from tests.support.workers import run_workers

CLASSES, WIDTH, BATCH, STEPS = 60, 6, 12, 8
TABLES = ["words.weight", "softmax.table.weight", "softmax.bias.weight"]


class Model(nn.Module):
    """Predicts a class from the one before it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.softmax = SampledSoftmaxLoss(CLASSES, WIDTH, 15, **options)

    def hidden(self, before: Tensor) -> Tensor:
        return torch.tanh(self.dense(self.words(before)))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    skewed = torch.rand(STEPS, 2, BATCH, generator=generator) ** 2
    return [(before, after) for before, after in (skewed * CLASSES).long()]


def train(
    options: dict[str, Any], shares: tuple[int, ...] | None = None
) -> tuple[dict[str, Tensor], float, list[str]]:
    """Train on this worker's share; all workers draw the same candidates."""
    torch.manual_seed(7)
    model = Model(**options).double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    generator = torch.Generator().manual_seed(3)
    with parallax.parallelize(model, optimizer) as session:
        for batch in batches():
            before, after = share(batch, session.rank, session.num_workers, shares)
            session.weight(len(after))
            model.softmax(model.hidden(before), after, generator).backward()
            optimizer.step()
            optimizer.zero_grad()
        before, after = batches()[0]
        with torch.no_grad():
            exact = model.softmax.full(model.hidden(before), after, chunk_size=7)
        routes = [session.plan[name].route.value for name in TABLES]
        return session.state_dict(), float(exact), routes


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sparse": True},
        {"proposal": "unigram", "counts": torch.arange(CLASSES) + 1},
        {"proposal": torch.linspace(0.1, 1, CLASSES)},
    ],
    ids=["log-uniform", "sparse", "unigram", "given"],
)
def test_workers_equal_one_process(options: dict[str, Any], num_workers: int) -> None:
    ((expected, exact, _),) = run_workers(train, 1, options)
    found = run_workers(train, num_workers, options)
    assert_same(found[0][0], expected, torch.float64)
    for _, value, routes in found:
        assert value == pytest.approx(exact, rel=1e-10)
        assert routes == ["sharded"] * len(TABLES)


def test_a_worker_without_targets_still_takes_part() -> None:
    ((expected, _, _),) = run_workers(train, 1, {})
    found = run_workers(train, 3, {}, (5, 0, 7))
    assert_same(found[0][0], expected, torch.float64)


def draws() -> list[int]:
    """The candidates of a worker that seeded torch's own generator with its rank."""
    torch.manual_seed(7)
    model = Model()
    with parallax.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        torch.manual_seed(1 + session.rank)
        drawn: list[int] = model.softmax.proposal.draw(torch.device("cpu")).tolist()
        before, after = batches()[0]
        model.softmax(model.hidden(before), after).backward()
        return drawn


def test_workers_draw_their_own_candidates_after_seeding_by_rank() -> None:
    first, second = run_workers(draws, 2)
    assert first != second
