"""Dense gradients: all of a reducer's buckets go the same way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallax import cost
from tests.support.workers import run_workers


def reduce(width: int) -> tuple[int, int, torch.Tensor]:
    """The bytes of all gradients, how many buckets went directly, and a gradient."""
    import parallax
    from parallax.exchange.direct import DirectSums

    started = []
    start = DirectSums.start

    def counted(self: DirectSums, values: torch.Tensor) -> object:
        started.append(len(values))
        return start(self, values)

    DirectSums.start = counted  # type: ignore[assignment, method-assign]
    model = nn.Sequential(nn.Linear(width, 512), nn.Linear(512, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = parallax.parallelize(model, optimizer)
    for _ in range(3):  # Buckets are laid out anew after the first.
        optimizer.zero_grad()
        started.clear()
        torch.manual_seed(session.rank)
        model(torch.randn(4, width)).mean().backward()
        optimizer.step()
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    gradient = model[2].weight.grad
    session.close()
    return size_bytes, len(started), gradient


@pytest.mark.parametrize(("width", "is_direct"), [(256, True), (640, False)])
def test_few_go_directly_and_many_all_by_the_ring(width: int, is_direct: bool) -> None:
    found = run_workers(reduce, 3, width)
    assert all((size <= cost.DIRECT_BYTES) == is_direct for size, _, _ in found)
    assert all(bool(number) == is_direct for _, number, _ in found)
    for _, _, gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0][2])
