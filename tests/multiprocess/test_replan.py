"""Tables change their route in the middle of a training, and nobody sees it in the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.workers import run_workers

ROWS, STEPS, BATCH = 48, 24, 12
NEVER = 10**6


@dataclass(frozen=True)
class Script:
    """A training whose steps touch all rows, then few, then all again."""

    optimizer: str = "Adagrad"
    zero_every: int = 1
    """Steps after which gradients are zeroed."""
    accumulate: int = 1
    late_backward: bool = False
    two_optimizers: bool = False
    cadence: int = 1
    """Steps of the first one for each of the second."""
    sparse: bool = False
    replan: bool = True
    num_steps: int = STEPS
    saves_at: int = NEVER
    loads: bool = False


class Net(nn.Module):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 3, sparse=script.sparse)
        self.tags = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 1)
        self.script = script

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids).mean(1) + self.tags(ids[:, 0] % 5)
        if self.script.late_backward:  # torch refuses a backward through a weight that was stepped
            return found.sum(1).square().mean()
        return self.out(found).square().mean()


def samples() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(ROWS, (STEPS, BATCH, 60), generator=generator)
    ids[8:16] = ids[8:16] % 2
    return ids.reshape(STEPS * BATCH, -1)


def optimizers_of(model: Net, script: Script) -> list[torch.optim.Optimizer]:
    kind = getattr(torch.optim, script.optimizer)
    groups = [[model.words.weight], [*model.tags.parameters(), *model.out.parameters()]]
    if not script.two_optimizers:
        groups = [[*groups[0], *groups[1]]]
    return [kind(group, lr=0.1) for group in groups]


@mock.patch.multiple("parallax.planning.replan", _FIRST_STEPS=2, _MAX_STEPS=2)
def train(script: Script, folder: str = "") -> tuple[dict[str, Tensor], list[str], str]:
    """Rank 0's state, the route of `words` after each step, and why it has the last one."""
    import parallax

    torch.manual_seed(0)
    model = Net(script).double()
    optimizers = optimizers_of(model, script)
    session = parallax.parallelize(model, optimizers, replan=script.replan)
    data: Any = samples()[: script.num_steps * BATCH]
    loader = session.shard(DataLoader(data, BATCH), split=True)
    if script.loads:
        session.load(folder)
    routes, waiting = [], None
    for step, ids in enumerate(loader):
        loss = model(ids)
        if script.late_backward:
            loss, waiting = waiting, loss
        if loss is not None:
            loss.backward()
        if loss is not None and (step + 1) % script.accumulate == 0:
            for place, optimizer in enumerate(optimizers):
                if place == 0 or (step + 1) % script.cadence == 0:
                    optimizer.step()
            if (step + 1) % script.zero_every == 0:
                model.zero_grad()
        routes.append(session.plan["words.weight"].route.value)
        if step == script.saves_at:
            session.save(folder)
    state, why = session.state_dict(), session.plan["words.weight"].why
    session.close()
    return state, routes, why


def assert_same(script: Script, num_workers: int, folder: str = "") -> list[str]:
    alone, _, _ = train(script, f"{folder}/alone")
    (state, routes, _), *others = run_workers(train, num_workers, script, f"{folder}/together")
    for _, theirs, _ in others:
        assert theirs == routes
    for name, value in alone.items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)
    return routes


@pytest.mark.parametrize(
    "script",
    [
        Script(),
        Script(optimizer="SGD"),
        Script(optimizer="SGD", zero_every=3),
        Script(accumulate=2),
        Script(two_optimizers=True),
        Script(two_optimizers=True, cadence=2),
        Script(sparse=True),
        Script(optimizer="AdamW"),
        Script(optimizer="Adam", zero_every=3),
    ],
)
def test_the_result_is_that_of_one_process(script: Script) -> None:
    """Also a gradient that stays is the same after a move, in either direction."""
    routes = assert_same(script, 3)
    changes = [route for i, route in enumerate(routes) if i == 0 or route != routes[i - 1]]
    assert changes == ["sharded", "all-reduce", "sharded", "all-reduce"]


def test_a_backward_one_batch_later_goes_along_to_all_reduce() -> None:
    routes = assert_same(Script(late_backward=True, num_steps=8), 2)
    assert routes[-1] == "all-reduce"


@pytest.mark.filterwarnings("ignore:table .* got a whole gradient")
def test_a_backward_of_before_a_table_is_one_again() -> None:
    assert "sharded" in assert_same(Script(late_backward=True), 2)[5:]


def test_it_can_be_switched_off() -> None:
    assert set(assert_same(Script(replan=False), 2)) == {"sharded"}


def train_in_little_memory() -> list[str]:
    from parallax.planning import touched_rows

    touched_rows.free_bytes = lambda device, workers: 4 * ROWS * 3 * 8.0  # type: ignore[assignment]
    return train(Script(num_steps=8))[1]


def test_a_table_that_does_not_fit_whole_stays_sharded() -> None:
    assert set(run_workers(train_in_little_memory, 2)[0]) == {"sharded"}


def test_why_is_told() -> None:
    _, _, why = run_workers(train, 2, Script())[0]
    assert why.startswith("a step touches 48 of 48 rows on a worker")


@pytest.mark.parametrize("step", [5, 13])
def test_a_checkpoint_of_either_route_goes_on_as_if_nothing_was(step: int, tmp_path: Path) -> None:
    alone, _, _ = train(Script())
    folder = str(tmp_path / "saved")
    (_, routes, _), _ = run_workers(train, 2, Script(saves_at=step), folder)
    assert routes[step] == ("all-reduce" if step == 5 else "sharded")
    for num_workers in (2, 3):
        state, _, _ = run_workers(train, num_workers, Script(loads=True), folder)[0]
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)
