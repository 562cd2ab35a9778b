"""Backwards inside backwards, and backwards that raise: reduced once, exactly, and again after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.errors import UnsupportedError
from tests.support.parity import assert_same
from tests.support.workers import run_workers

WIDTH, ROWS, SAMPLES = 6, 30, 12


class Net(nn.Module):
    """Segments that are checkpointed, or not; each also looks rows up in a table."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.table = nn.Embedding(ROWS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, batch: tuple[Tensor, Tensor], reentrant: bool) -> Tensor:
        ids, targets = batch

        def segment(layer: nn.Module, hidden: Tensor, column: Tensor) -> Tensor:
            hidden = torch.tanh(layer(hidden)) + self.table(column)
            return self.shared(hidden) if "shared" in self.form else hidden

        def nested(hidden: Tensor) -> Tensor:
            for layer in self.layers:
                hidden = run(segment, layer, hidden, ids[:, 1])
            return hidden

        def run(function: Any, *args: Any) -> Any:
            return checkpoint(function, *args, use_reentrant=True) if reentrant else function(*args)

        hidden = self.table(ids[:, 0])
        if self.form == "from the input":
            hidden = hidden.detach().requires_grad_()
        else:
            hidden = self.first(hidden)
        hidden = run(nested, hidden) if self.form == "nested" else nested(hidden)
        if self.form == "shared outside":
            hidden = self.shared(hidden)
        if self.form == "parallel":
            hidden = hidden + run(segment, self.layers[0], hidden, ids[:, 2])
        # With "inside" all gradients come in inner backwards.
        found = hidden.sum(1) if self.form == "inside" else self.out(hidden).squeeze(-1)
        return (found - targets).pow(2).mean()


def batch_of(step: int, rank: int, num_workers: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (SAMPLES, 3), generator=generator)
    targets = torch.randn(SAMPLES, dtype=torch.float64, generator=generator)
    return ids[rank::num_workers], targets[rank::num_workers]


def make(form: str) -> tuple[Any, Any, Any]:
    import parallax

    torch.manual_seed(3)
    model = Net(form).double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, optimizer, parallax.parallelize(model, optimizer, timeout_seconds=20.0)


def train(form: str, *, reentrant: bool, from_step: int = 0) -> dict[str, Tensor]:
    model, optimizer, session = make(form)
    for step in range(4):
        batch = batch_of(step, session.rank, session.num_workers)
        model(batch, reentrant and step >= from_step).backward()
        for layer in (model.layers[0], model.layers[2]):  # All workers have the mean by now.
            gradient = layer.weight.grad.clone()
            session._peers.broadcast(gradient, "the test")
            assert torch.equal(gradient, layer.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert session.num_workers == 1 or session.ledger.steps[-1].reductions == 1
    return session.state_dict()


def train_reentrant(form: str, from_step: int = 0) -> dict[str, Tensor]:
    return train(form, reentrant=True, from_step=from_step)


FORMS = ["chain", "inside", "shared", "shared outside", "nested", "parallel", "from the input"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_reentrant_checkpoints_are_reduced_once(form: str, num_workers: int) -> None:
    found = run_workers(train_reentrant, num_workers, form)[0]
    assert_same(found, train(form, reentrant=False), torch.float64)


@pytest.mark.parametrize("form", ["chain", "inside", "nested", "from the input"])
def test_checkpoints_that_come_later_are_reduced_once_too(form: str) -> None:
    found = run_workers(train_reentrant, 2, form, 2)[0]
    assert_same(found, train(form, reentrant=False), torch.float64)


def share_later() -> None:
    model, optimizer, session = make("shared")
    for step in range(3):
        model(batch_of(step, session.rank, 2), False).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="parameter 'shared.*' got two gradients"):
        model(batch_of(3, session.rank, 2), True).backward()
    optimizer.zero_grad()
    model(batch_of(3, session.rank, 2), True).backward()  # Now it is known.


def test_a_second_gradient_that_comes_late_is_named() -> None:
    run_workers(share_later, 2)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("a mistake of the script")


def train_after_raising(reentrant: bool, raises: bool) -> dict[str, Tensor]:
    model, optimizer, session = make("chain")
    for step in range(4):
        batch = batch_of(step, session.rank, session.num_workers)
        if raises and step in (0, 2):
            # The last layers have their gradients when it raises.
            handle = model.layers[0].register_forward_hook(lambda *a: Raises.apply(a[2]))
            with pytest.raises(KeyError):
                model(batch, reentrant).backward()
            handle.remove()
            if step == 2:
                assert model.out.weight.grad is not None
            optimizer.zero_grad()
        model(batch, reentrant).backward()
        optimizer.step()
        assert session.num_workers == 1 or session.ledger.steps[-1].reductions == 1
        optimizer.zero_grad()
    return session.state_dict()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_backward_after_one_that_raised_is_reduced(num_workers: int, reentrant: bool) -> None:
    found = run_workers(train_after_raising, num_workers, reentrant, True)[0]
    assert_same(found, train_after_raising(False, False), torch.float64)
