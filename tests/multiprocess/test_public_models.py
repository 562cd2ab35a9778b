"""Models of other packages with Adam: N workers have the loss curve of one process.

The models are small and start at random, so nothing is downloaded. The same workers train one after
the other, and before that alone with plain torch, because importing the packages takes longer than
training does. Dropout is off, and batch norm uses its running statistics: with either of them one
process on the joined batch would compute something else than N workers on their shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.parity import TOLERANCE, assert_same
from tests.support.workers import run_workers

NUM_STEPS, BATCH, NUM_WORKERS = 24, 9, 2
LENGTH = 12
FIELDS = [300, 40, 7]
WORDS = "transformer.wte.weight"
POSITIONS = "transformer.wpe.weight"
FACTORS = "embedding.embedding.weight"
WEIGHTS = "linear.fc.weight"
SHARDED = ("sharded", "every row")


class Gpt2(nn.Module):
    """The model, and the loss that `labels` give or the same in float64."""

    def __init__(self, *, tied: bool, labels: bool, num_positions: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=500,
            n_positions=num_positions,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=tied,
        )
        self.model, self.labels = GPT2LMHeadModel(config), labels

    def forward(self, words: Tensor) -> Tensor:
        if self.labels:  # The package computes this loss in float32.
            return self.model(input_ids=words, labels=words).loss  # type: ignore[no-any-return]
        logits = self.model(input_ids=words).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


class Clicks(nn.Module):
    """A model of torchfm, which gives probabilities, and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, samples: Tensor) -> Tensor:
        found = self.model(samples[:, :-1])
        return F.binary_cross_entropy(found, samples[:, -1].to(found.dtype))


def factorization_machine() -> nn.Module:
    from torchfm.model.fm import FactorizationMachineModel

    return Clicks(FactorizationMachineModel(FIELDS, embed_dim=8))


def deep_factorization_machine() -> nn.Module:
    from torchfm.model.dfm import DeepFactorizationMachineModel

    return Clicks(DeepFactorizationMachineModel(FIELDS, 8, mlp_dims=(16,), dropout=0.2))


def words() -> Tensor:
    """Sequences of a fifth of the words, so that most rows of the table are never touched."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(100, (NUM_STEPS * BATCH, LENGTH), generator=generator)


def clicks() -> Tensor:
    """A value of each field, of the largest only some, and whether it was clicked."""
    generator = torch.Generator().manual_seed(1)
    columns = [
        torch.randint(size, (NUM_STEPS * BATCH,), generator=generator) for size in (60, 40, 7)
    ]
    return torch.stack([*columns, columns[2] % 2], 1)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    data: Callable[[], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    dtype: torch.dtype
    tables: dict[str, tuple[str, str | None]]
    """Route and row rule of some parameters after the last step."""


adam, adamw = torch.optim.Adam, torch.optim.AdamW
double, single = torch.float64, torch.float32
FM = {FACTORS: SHARDED, WEIGHTS: SHARDED}
CASES = {
    "gpt2": Case(
        lambda: Gpt2(tied=False, labels=False, num_positions=64),
        words,
        adamw,
        double,
        {WORDS: SHARDED, POSITIONS: SHARDED, "lm_head.weight": ("all-reduce", None)},
    ),
    # Each step touches every position, so that table is all-reduced after the first steps.
    "gpt2-labels": Case(
        lambda: Gpt2(tied=False, labels=True, num_positions=LENGTH),
        words,
        adamw,
        single,
        {WORDS: SHARDED, POSITIONS: ("all-reduce", "every row")},
    ),
    "gpt2-tied": Case(
        lambda: Gpt2(tied=True, labels=False, num_positions=64),
        words,
        adamw,
        double,
        {WORDS: ("all-reduce", None), POSITIONS: SHARDED},
    ),
    "fm": Case(factorization_machine, clicks, adam, double, FM),
    "deepfm": Case(deep_factorization_machine, clicks, adam, double, FM),
}


class Trained(NamedTuple):
    """One model after training."""

    losses: list[tuple[float, int]]
    """Of each step: the mean loss of this worker's samples, and their number."""
    state: dict[str, Tensor]
    tables: dict[str, tuple[str, str | None]]


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(3)
    model = case.make().to(case.dtype)
    loader: Any = DataLoader(case.data(), BATCH)  # type: ignore[arg-type]
    return model, case.optimizer(model.parameters(), lr=0.03), loader


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]
) -> list[tuple[float, int]]:
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), len(batch)))
    return losses


def train_alone(case: Case) -> Trained:
    model, optimizer, loader = build(case)
    losses = train(model, optimizer, loader)
    return Trained(losses, model.state_dict(), {})


def train_together(case: Case) -> Trained:
    import parallax

    model, optimizer, loader = build(case)
    with parallax.parallelize(model, optimizer) as session:
        losses = train(model, optimizer, session.shard(loader, split=True))
        entries = {name: session.plan[f"model.{name}"] for name in case.tables}
        tables = {name: (entry.route.value, entry.row_rule) for name, entry in entries.items()}
        return Trained(losses, session.state_dict(), tables)


def train_all() -> tuple[dict[str, Trained], dict[str, Trained]]:
    alone = {name: train_alone(case) for name, case in CASES.items()}
    return alone, {name: train_together(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[tuple[dict[str, Trained], dict[str, Trained]]]:
    return run_workers(train_all, NUM_WORKERS)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_curve_is_that_of_one_process(name: str, results: Any) -> None:
    case, alone = CASES[name], results[0][0][name]
    workers = [together[name] for _, together in results]
    of_steps = zip(*(worker.losses for worker in workers), strict=True)
    expected = [loss for loss, _ in alone.losses]
    assert len(expected) == NUM_STEPS
    assert sum(expected[-6:]) < sum(expected[:6])
    assert [joined_loss(*each) for each in of_steps] == pytest.approx(
        expected, rel=TOLERANCE[case.dtype]
    )
    assert [worker.tables for worker in workers] == [case.tables] * NUM_WORKERS
    # The biases of GPT-2's keys have gradients of zero but for rounding, which Adam scales up: in
    # float32 they differ by more than the tolerance, and the loss does not depend on them.
    if case.dtype == double:
        assert_same(workers[0].state, alone.state, double)


def joined_loss(*of_workers: tuple[float, int]) -> float:
    """The mean loss of all samples of a step."""
    return sum(loss * count for loss, count in of_workers) / BATCH
