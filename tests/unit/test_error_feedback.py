"""Error feedback: rounding errors by row, for a bounded number of rows."""

from __future__ import annotations

import torch

from parallax.comm.error_feedback import ErrorFeedback


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([[value, -value] for value in values], dtype=torch.float32)


def test_rows_come_back_whatever_their_order() -> None:
    feedback = ErrorFeedback(torch.empty(10, 2), max_rows=10)
    assert torch.equal(feedback.lookup(torch.tensor([7, 2])), rows(0, 0))
    feedback.store(torch.tensor([7, 2]), rows(1, 2))
    feedback.store(torch.tensor([2, 9, 0]), rows(3, 4, 5))
    assert torch.equal(feedback.lookup(torch.tensor([0, 2, 7, 8, 9])), rows(5, 3, 1, 0, 4))
    ids, kept = feedback.items()
    assert ids.tolist() == [0, 2, 7, 8, 9]
    assert torch.equal(kept, rows(5, 3, 1, 0, 4))
    nothing = torch.empty(0, dtype=torch.int64)
    assert feedback.lookup(nothing).shape == (0, 2)


def test_it_is_cleared_when_it_has_too_many_rows() -> None:
    feedback = ErrorFeedback(torch.empty(100, 2), max_rows=12)
    for first in range(0, 12, 3):
        feedback.store(torch.arange(first, first + 3), rows(1, 1, 1))
    assert len(feedback.items()[0]) == 12
    feedback.store(torch.tensor([50, 3]), rows(7, 8))
    ids, kept = feedback.items()
    assert ids.tolist() == [3, 50]
    assert torch.equal(kept, rows(8, 7))
    assert torch.equal(feedback.lookup(torch.tensor([0])), rows(0))
    feedback.store(
        torch.arange(100), torch.ones(100, 2)
    )  # All rows of one push are stored, however many.
    assert len(feedback.items()[0]) == 100
