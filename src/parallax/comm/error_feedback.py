"""Error feedback for compressed pushes: remember what rounding lost and add it to the next push.

See [Note: compression] in compression.py. Memory is bounded: at most `max_rows` rows, or four
pushes. When the buffer is full it is cleared, which loses one rounding error per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallax.tables.merge import put_rows

_MIN_PUSHES = 4


class ErrorFeedback:
    """Rounding errors of one table's rows, by row id. Rows without an entry count as zero."""

    def __init__(self, table: Tensor, max_rows: int) -> None:
        device = table.device
        self._max_rows = max_rows
        self._places = torch.full((len(table),), -1, dtype=torch.int32, device=device)
        """By row id: the row's position in the buffer; -1: it has no entry."""
        self._buffer = torch.empty((0, *table.shape[1:]), dtype=table.dtype, device=device)
        """Rows are in the order in which they were first pushed."""
        self._num_rows = 0

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the stored errors of `ids` (distinct)."""
        places = self._allocate(ids)
        return self._buffer.index_select(0, places) if len(ids) else self._buffer[:0]

    def store(self, ids: Tensor, errors: Tensor) -> None:
        """Replace the stored errors of `ids` (distinct)."""
        places = self._allocate(ids)  # May replace the buffer.
        put_rows(self._buffer, places, errors)

    def items(self) -> tuple[Tensor, Tensor]:
        """Return (ids, errors) of all stored rows, for checkpoints."""
        ids = (self._places >= 0).nonzero().squeeze(1)
        return ids, self.lookup(ids)

    def _allocate(self, ids: Tensor) -> Tensor:
        """Return the positions of `ids` in the buffer; new ids get one. May clear the buffer."""
        new = ids[self._places.index_select(0, ids) < 0]
        if len(new):
            if self._num_rows + len(new) > max(self._max_rows, _MIN_PUSHES * len(ids)):
                self._clear()
                new = ids
            first, self._num_rows = self._num_rows, self._num_rows + len(new)
            self._grow(self._num_rows)
            places = torch.arange(first, self._num_rows, dtype=torch.int32, device=ids.device)
            self._places[new] = places
        return self._places.index_select(0, ids).long()

    def _clear(self) -> None:
        self._places.fill_(-1)
        self._buffer.zero_()
        self._num_rows = 0

    def _grow(self, num_rows: int) -> None:
        if num_rows <= len(self._buffer):
            return
        size = min(max(num_rows, 2 * len(self._buffer)), len(self._places))
        grown = self._buffer.new_zeros((size, *self._buffer.shape[1:]))
        grown[: len(self._buffer)] = self._buffer
        self._buffer = grown
