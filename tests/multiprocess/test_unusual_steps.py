"""Steps that ordinary loops do not make end where plain torch on the joined batch does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.support.workers import run_workers

ROWS, BATCH, STEPS = 60, 8, 12
BEAT_SECONDS = 0.05
Script = Callable[["Training"], None]


class Net(nn.Module):
    """Two tables alike, and one whose rows are numbers."""

    def __init__(self, num_rows: int = ROWS) -> None:
        super().__init__()
        self.words = nn.Embedding(num_rows, 4)
        self.tags = nn.Embedding(num_rows, 4)
        self.bias = nn.Parameter(torch.rand(num_rows))

    def forward(self, ids: Tensor) -> Tensor:
        found = (self.words(ids[:, 0]) * self.tags(ids[:, 1])).sum(1)
        return (found + self.bias[ids[:, 2]]).square().mean()


class Training:
    """A model with Parallax, or with plain torch."""

    def __init__(self, is_plain: bool) -> None:
        self.is_plain = is_plain
        self.session: Any = None
        torch.manual_seed(0)
        self.model = Net().double()

    @property
    def rank(self) -> int:
        return 0 if self.is_plain else self.session.rank

    def begin(self, *optimizers: Optimizer, **options: Any) -> None:
        if self.is_plain:
            return
        import parallax
        from parallax.cluster import heartbeats
        from parallax.comm import pull

        pull.EARLY_BYTES, heartbeats.BEAT_SECONDS = 0, BEAT_SECONDS
        options = {"routes": {"*": "sharded"}, "replan": False, **options}
        self.session = parallax.parallelize(self.model, list(optimizers), **options)

    def batches(self, data: Tensor, size: int = BATCH, **options: Any) -> Iterable[Tensor]:
        loader: Any = DataLoader(data, size)  # type: ignore[arg-type]
        return loader if self.is_plain else self.session.shard(loader, split=True, **options)

    def state(self) -> dict[str, Tensor]:
        if self.is_plain:
            return self.model.state_dict()
        found: dict[str, Tensor] = self.session.state_dict()
        self.session.close()
        return found


def random_batches(number: int = STEPS, size: int = BATCH, num_rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(num_rows, (size, 3), generator=generator) for _ in range(number)]


def train(name: str, is_plain: bool = False) -> dict[str, Tensor]:
    training = Training(is_plain)
    SCRIPTS[name](training)
    return training.state()


# Scripts ----------------------------------------------------------------------------------


def other_ids_on_one_worker(training: Training) -> None:
    """One worker pushes other rows than it asked for; no ids fit into a header."""
    training.model = Net(5000).double()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.begin(optimizer)
    data = torch.cat(random_batches(8, 800, 5000))
    for number, ids in enumerate(training.batches(data, 800)):
        loss = training.model(ids)
        if number == 5 and (training.is_plain or training.rank == 1):
            others = (ids[-3:, 0] + 1) % 5000
            # The mean over two workers halves what one of them adds.
            weight = 1 if training.is_plain else 2
            loss = loss + weight * training.model.words(others).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def backward_after_an_empty_step(training: Training) -> None:
    """A lookup's gradient comes a step later, and in between nothing had a gradient."""
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.begin(optimizer)
    batches = random_batches()
    batches[7] = batches[5].clone()
    waiting = None
    for number, ids in enumerate(training.batches(torch.cat(batches))):
        loss = training.model(ids)
        if number == 5:
            optimizer.step()
            waiting = loss
            continue
        time.sleep(0.2 if number == 6 else 0.0)  # The rows of batch 7 have come early.
        if waiting is not None:
            waiting.backward()
            waiting = None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def gradient_that_outlives_a_step(training: Training) -> None:
    """One of two optimizers steps before the last backward of a step."""
    model = training.model
    words = torch.optim.SGD(model.words.parameters(), lr=0.05)
    others = torch.optim.SGD([*model.tags.parameters(), model.bias], lr=0.05)
    training.begin(words, others)
    batches = random_batches()
    batches[7], batches[10] = batches[5].clone(), batches[8].clone()
    for number, ids in enumerate(training.batches(torch.cat(batches))):
        model(ids).backward()
        words.step()
        words.zero_grad()
        if number in (5, 8):
            model(ids).backward()
        time.sleep(0.1)
        others.step()
        others.zero_grad()


def update_before_the_backward(training: Training) -> None:
    """A step with gradients of the batch before, while one worker still pulls other rows."""
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.5)
    training.begin(optimizer)
    batches = random_batches()
    half = BATCH // 2
    for number, ids in enumerate(training.batches(torch.cat(batches))):
        if number == 5 and training.is_plain:
            ids = torch.cat([ids[:half], batches[4][:half]])
        elif number == 5 and training.rank == 1:
            time.sleep(1.0)
            ids = batches[4][:half]
        loss = training.model(ids)
        if number == 5:
            optimizer.step()
            optimizer.zero_grad()
        loss.backward()
        if number != 4:
            optimizer.step()
            optimizer.zero_grad()


def _raise_in_a_step(training: Training, optimizer: Optimizer, how: str) -> None:
    raises = [False]

    def hook(*_: object) -> None:
        if raises[0]:
            raises[0] = False
            raise KeyboardInterrupt

    training.begin(optimizer)
    optimizer.register_step_pre_hook(hook)
    for number, ids in enumerate(training.batches(torch.cat(random_batches()))):
        training.model(ids).backward()
        raises[0] = number in (3, 8)
        with suppress(KeyboardInterrupt):
            optimizer.step()
        if how == "model":
            training.model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=how == "optimizer")


def named_ids_without_any(training: Training) -> None:
    """`shard(ids=…)` names a table that no lookup uses in some batches."""
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.begin(optimizer)
    ids_of = {"words.weight": lambda ids: [] if int(ids[0, 0]) % 2 else [ids[:, 0]]}
    options = {} if training.is_plain else {"ids": ids_of}
    for ids in training.batches(torch.cat(random_batches()), **options):
        training.model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


class AssigningSGD(torch.optim.SGD):
    """Puts other data into its parameters instead of changing them in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


class EagerSGD(torch.optim.SGD):
    """Makes state for each parameter, whether it has a gradient or not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                if parameter.grad is not None:
                    state["average"].mul_(0.9).add_(parameter.grad)
                    parameter.sub_(state["average"], alpha=group["lr"])


def _plain_loop(training: Training, optimizer: Optimizer) -> None:
    training.begin(optimizer)
    for ids in training.batches(torch.cat(random_batches())):
        training.model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()


SCRIPTS: dict[str, Script] = {
    "other ids on one worker": other_ids_on_one_worker,
    "a backward after an empty step": backward_after_an_empty_step,
    "a gradient that outlives a step": gradient_that_outlives_a_step,
    "an update before the backward": update_before_the_backward,
    "named ids without any": named_ids_without_any,
    **{
        f"{name} raises, {how} zeroes": lambda training, make=make, how=how: _raise_in_a_step(
            training, make(training.model.parameters(), lr=0.1), how
        )
        for name, make in (("SGD", torch.optim.SGD), ("Adam", torch.optim.Adam))
        for how in ("model", "optimizer", "zeros")
    },
    **{
        kind.__name__: lambda training, kind=kind: _plain_loop(
            training, kind(training.model.parameters(), lr=0.1)
        )
        for kind in (AssigningSGD, EagerSGD)
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_ends_as_in_plain_torch(name: str) -> None:
    expected = train(name, is_plain=True)
    found = run_workers(train, 2, name)[0]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10)
