"""Dense gradients: all of a reducer's buckets go the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallax.planning import cost
from tests.support.workers import run_workers


def reduce(width: int) -> tuple[int, int, int, torch.Tensor]:
    """Bytes of all gradients, how many all-reduces and direct sums a backward made, and a
    gradient."""
    import torch.distributed as dist

    import parallax
    from parallax.comm.direct import DirectSums

    went: list[str] = []

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **options: Any) -> object:
            went.append(name)
            return function(*args, **options)

        setattr(owner, name, call)

    counted(DirectSums, "start")
    counted(dist, "all_reduce")
    # The gradients of the last layer come first and fill a bucket; a small one is left.
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 512), nn.Linear(512, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = parallax.parallelize(model, optimizer)
    for _ in range(3):  # Buckets are laid out anew after the first.
        optimizer.zero_grad()
        went.clear()
        torch.manual_seed(session.rank)
        model(torch.randn(4, 4)).mean().backward()
        optimizer.step()
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    gradient = model[0].weight.grad
    session.close()
    return size_bytes, went.count("all_reduce"), went.count("start"), gradient


@pytest.mark.parametrize(("width", "is_direct"), [(256, True), (640, False)])
def test_few_go_directly_and_many_all_by_the_ring(width: int, is_direct: bool) -> None:
    found = run_workers(reduce, 3, width)
    for size_bytes, num_by_ring, num_direct, gradient in found:
        assert (size_bytes <= cost.DIRECT_BYTES) == is_direct
        assert (num_by_ring, num_direct) == ((0, 1) if is_direct else (2, 0))
        torch.testing.assert_close(gradient, found[0][3])


def clock() -> list[tuple[float, float]]:
    """Of three steps: what the backward took between its gradients, and the whole step."""
    import time

    import parallax

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, values: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return values.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return gradient

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallax.parallelize(model, optimizer) as session:
        for _ in range(3):
            model[1](Slow.apply(model[0](torch.ones(2, 4)))).mean().backward()
            optimizer.step()
        return [(step.backward_seconds, step.seconds) for step in session.ledger.steps]


def test_the_ledger_has_the_time_between_gradients() -> None:
    for steps in run_workers(clock, 2):
        assert len(steps) == 3
        for between, whole in steps:
            assert 0.05 <= between <= whole - 0.1
