"""What rounding took: kept by row, for as many rows as there may be."""

from __future__ import annotations

import torch

from parallax.comm.error_feedback import Residue


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([[value, -value] for value in values], dtype=torch.float32)


def test_rows_come_back_whatever_their_order() -> None:
    residue = Residue(torch.empty(10, 2), max_rows=10)
    assert torch.equal(residue.of(torch.tensor([7, 2])), rows(0, 0))
    residue.keep(torch.tensor([7, 2]), rows(1, 2))
    residue.keep(torch.tensor([2, 9, 0]), rows(3, 4, 5))
    assert torch.equal(residue.of(torch.tensor([0, 2, 7, 8, 9])), rows(5, 3, 1, 0, 4))
    ids, kept = residue.kept()
    assert ids.tolist() == [0, 2, 7, 8, 9]
    assert torch.equal(kept, rows(5, 3, 1, 0, 4))
    nothing = torch.empty(0, dtype=torch.int64)
    assert residue.of(nothing).shape == (0, 2)


def test_it_begins_anew_when_it_has_too_many_rows() -> None:
    residue = Residue(torch.empty(100, 2), max_rows=12)
    for first in range(0, 12, 3):
        residue.keep(torch.arange(first, first + 3), rows(1, 1, 1))
    assert len(residue.kept()[0]) == 12
    residue.keep(torch.tensor([50, 3]), rows(7, 8))
    ids, kept = residue.kept()
    assert ids.tolist() == [3, 50]
    assert torch.equal(kept, rows(8, 7))
    assert torch.equal(residue.of(torch.tensor([0])), rows(0))
    residue.keep(torch.arange(100), torch.ones(100, 2))  # A push is kept whole, however large.
    assert len(residue.kept()[0]) == 100
