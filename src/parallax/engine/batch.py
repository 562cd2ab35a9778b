"""A batch whose rows were prefetched, for as long as its lookups can take them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from parallax.tables.host import repeat, to_device
from parallax.tables.space import Request, SlotSpace

Foreseen = tuple[str, Tensor, int, Tensor]
"""The ids that a lookup of a batch is expected to have: name of the table, the part of the batch
that they come from, its version (-1: changes of it cannot be seen), and a flat copy of the ids,
64 bits each, because a script may change its batch in place. A tuple, for there are many."""


def foreseen(sources: list[tuple[str, Tensor]], device: torch.device) -> list[Foreseen]:
    """Read the ids of all lookups of a batch, each given by its table and its part of it."""
    if not sources:
        return []
    joined = torch.cat([source.reshape(-1) for _, source in sources]).to(device).long()
    pieces = joined.split_with_sizes([source.numel() for _, source in sources])
    return [
        (name, source, -1 if source.is_inference() else source._version, ids)
        for (name, source), ids in zip(sources, pieces, strict=True)
    ]


class Batch:
    """The rows of a batch's lookups."""

    def __init__(
        self,
        space: SlotSpace,
        request: Request,
        rows: list[Tensor],
        lookups: list[Foreseen],
        positions: dict[str, int],
        tables: set[str],
        indices: Tensor | None,
    ) -> None:
        """`rows` are by group, in the order of the request's keys; `tables` are those of which
        all workers have their rows. `indices` are those of the request, by owner, if it went to
        the owners as it is."""
        self.space = space
        self.indices = indices
        self.request = request
        self.open = tables
        """Tables whose lookups need no message. See [Note: window] in prefetcher.py."""
        self.used: set[str] = set()
        """Tables of which a lookup has taken rows."""
        self._positions = positions
        starts = request.starts
        sizes = request.counts.sum(1)
        by_table: list[Tensor] = []
        first = 0
        for each, end in zip(rows, space.group_ends.tolist(), strict=True):
            by_table += each.split_with_sizes(sizes[first:end].tolist())
            first = end
        self.rows = by_table
        """By position of the table."""
        self.outputs: tuple[Tensor, ...] | None = None
        """The same rows as parts of a recorded graph, once a lookup has recorded one."""
        tables_of = [positions[name] for name, _, _, _ in lookups]
        numbers = [len(ids) for _, _, _, ids in lookups]
        firsts = to_device(starts[tables_of], space.device)
        places = request.places - repeat(firsts, np.array(numbers, np.int64))
        self._lookups: dict[str, list[tuple[Foreseen, Tensor]]] = {}
        for lookup, piece in zip(lookups, places.split_with_sizes(numbers), strict=True):
            self._lookups.setdefault(lookup[0], []).append((lookup, piece))

    def match(self, name: str, ids: Tensor) -> tuple[int, Tensor] | None:
        """Return the position of a table and the places of these ids among its rows, if this lookup
        was foreseen."""
        if name not in self.open or not isinstance(ids, Tensor):
            return None
        for (_, source, version, copy), places in self._lookups[name]:
            # Their memory tells, without a look at the values, unless the script made a copy.
            is_same = ids is source or (
                ids.data_ptr() == source.data_ptr()
                and ids.shape == source.shape
                and ids.stride() == source.stride()
                and ids.dtype is source.dtype
            )
            if not is_same or ids.is_inference() or ids._version != version:
                is_same = _is_equal(ids, copy)
            if is_same:
                self.used.add(name)
                return self._positions[name], places if ids.dim() == 1 else places.view(ids.shape)
        return None

    def rows_of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a table's slots and rows."""
        position = self._positions[name]
        return self.slots_of(name), self.rows[position]

    def slots_of(self, name: str) -> Tensor:
        """Return the slots of a table's rows."""
        position = self._positions[name]
        first, end = self.request.starts[position : position + 2].tolist()
        return self.request.keys[first:end] - int(self.space.first_keys[position])

    def padding_place(self, name: str, row: int) -> int | None:
        """Return where a padding row is among a table's rows."""
        position = self._positions[name]
        number = self.space.padding_of.get((position, row))
        if number is not None:
            place = int(self.request.paddings[number])
            return place - int(self.request.starts[position]) if place >= 0 else None
        slots = self.slots_of(name)
        found = (slots == self.space.maps[position].slot(row)).nonzero()
        return int(found) if len(found) else None


def _is_equal(ids: Tensor, copy: Tensor) -> bool:
    if ids.is_floating_point() or ids.device != copy.device or ids.numel() != len(copy):
        return False
    return torch.equal(ids.reshape(-1).long(), copy)
