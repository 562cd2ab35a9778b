"""What rounding took from the gradients that this worker has pushed. See [Note: wire] in wire.py.

Rows are kept beside each other in the order in which they were first pushed. There are at most as
many as a worker owns, or a few pushes have, so that memory does not grow to a copy of the table; if
more come, all begin anew, which costs one rounding of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallax.tables.merge import put_rows

_PUSHES = 4


class Residue:
    """Of one table; rows that were never kept are zero."""

    def __init__(self, table: Tensor, max_rows: int) -> None:
        device = table.device
        self._max_rows = max_rows
        self._places = torch.full((len(table),), -1, dtype=torch.int32, device=device)
        """By id of a row: where it is kept."""
        self._rows = torch.empty((0, *table.shape[1:]), dtype=table.dtype, device=device)
        self._num_kept = 0

    def of(self, ids: Tensor) -> Tensor:
        """What is kept for some distinct ids."""
        places = self._places_of(ids)
        return self._rows.index_select(0, places) if len(ids) else self._rows[:0]

    def keep(self, ids: Tensor, rows: Tensor) -> None:
        """Instead of what was kept for these distinct ids."""
        places = self._places_of(ids)
        put_rows(self._rows, places, rows)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Ids and rows of all of which something is."""
        ids = (self._places >= 0).nonzero().squeeze(1)
        return ids, self.of(ids)

    def _places_of(self, ids: Tensor) -> Tensor:
        new = ids[self._places.index_select(0, ids) < 0]
        if len(new):
            if self._num_kept + len(new) > max(self._max_rows, _PUSHES * len(ids)):
                self._forget()
                new = ids
            first, self._num_kept = self._num_kept, self._num_kept + len(new)
            self._make_room(self._num_kept)
            places = torch.arange(first, self._num_kept, dtype=torch.int32, device=ids.device)
            self._places[new] = places
        return self._places.index_select(0, ids).long()

    def _forget(self) -> None:
        self._places.fill_(-1)
        self._rows.zero_()
        self._num_kept = 0

    def _make_room(self, num_rows: int) -> None:
        if num_rows <= len(self._rows):
            return
        size = min(max(num_rows, 2 * len(self._rows)), len(self._places))
        grown = self._rows.new_zeros((size, *self._rows.shape[1:]))
        grown[: len(self._rows)] = self._rows
        self._rows = grown
