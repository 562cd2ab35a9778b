"""What rounding took from the gradients that this worker has pushed. See [Note: wire] in wire.py.

Rows are kept beside each other in the order in which they were first touched, so that it takes
memory for the rows that this worker touches, not for the whole table.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Residue:
    """Of one table; rows that were never kept are zero."""

    def __init__(self, table: Tensor) -> None:
        device = table.device
        self._places = torch.full((len(table),), -1, dtype=torch.int64, device=device)
        """By id of a row: where it is kept."""
        self._rows = torch.empty((0, *table.shape[1:]), dtype=table.dtype, device=device)
        self._num_kept = 0

    def of(self, ids: Tensor) -> Tensor:
        """The rows of some distinct ids."""
        places = self._places_of(ids)
        return self._rows.index_select(0, places) if len(ids) else self._rows[:0]

    def keep(self, ids: Tensor, rows: Tensor) -> None:
        """Instead of what was kept for these distinct ids."""
        places = self._places_of(ids)
        self._rows.index_copy_(0, places, rows)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Ids and rows of all of which something is."""
        ids = (self._places >= 0).nonzero().squeeze(1)
        return ids, self.of(ids)

    def _places_of(self, ids: Tensor) -> Tensor:
        places = self._places.index_select(0, ids)
        new = ids[places < 0]
        if not len(new):
            return places
        first, self._num_kept = self._num_kept, self._num_kept + len(new)
        self._make_room(self._num_kept)
        self._places[new] = torch.arange(first, self._num_kept, device=ids.device)
        return self._places.index_select(0, ids)

    def _make_room(self, num_rows: int) -> None:
        if num_rows <= len(self._rows):
            return
        size = min(max(num_rows, 2 * len(self._rows)), len(self._places))
        grown = self._rows.new_zeros((size, *self._rows.shape[1:]))
        grown[: len(self._rows)] = self._rows
        self._rows = grown
