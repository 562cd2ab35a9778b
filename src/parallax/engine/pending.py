"""Row gradients that autograd has brought and no reduction has taken yet.

Gradients of gathered lookups (see [Note: gather] in batch.py) are sums by row of the whole batch.
All others are kept by table. If the rows with a gradient are exactly those of the last batch, their
owners know them from the pull, and the push needs no ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax.engine.batch import Batch
from parallax.engine.push import RowGradients
from parallax.engine.table_set import TableSet
from parallax.tables.merge import merged
from parallax.tables.space import Keys


@dataclass(frozen=True)
class _Piece:
    """The gradient of some rows of one table: all that a batch has of it, or those in `slots`."""

    values: Tensor
    batch: Batch | None
    slots: Tensor | None

    def slots_of(self, name: str) -> Tensor:
        if self.slots is not None:
            return self.slots
        assert self.batch is not None
        return self.batch.slots_of(name)


@dataclass
class _BatchSums:
    """Gradients of a batch's rows, in the order of keys."""

    batch: Batch
    values: list[Tensor | None]
    """One tensor for each group."""
    names: set[str]
    """Tables that have a gradient."""


class PendingGradients:
    """Row gradients of this worker that are not reduced yet."""

    def __init__(self, tables: TableSet) -> None:
        self.touched: set[str] = set()
        """Tables that got a gradient since the last reduction, whatever its weight."""
        self._tables = tables
        self._sums: _BatchSums | None = None
        self._pieces: dict[str, list[_Piece]] = {}

    def add(self, name: str, values: Tensor, batch: Batch | None, slots: Tensor | None) -> None:
        """Add the gradient of a table's rows: those of a batch, or those in `slots`."""
        self._pieces.setdefault(name, []).append(_Piece(values, batch, slots))

    def add_gathered(
        self,
        batch: Batch,
        numbers: list[list[int]],
        gradients: Mapping[int, Tensor],
        scale: float,
    ) -> None:
        """Add the gradients of gathered lookups. `numbers` are the lookups of each group; those
        without a gradient are not in `gradients`."""
        if self._sums is None or self._sums.batch is not batch:
            self._split_sums()
            self._sums = _BatchSums(batch, [None] * len(numbers), set())
        self._sums.names |= {batch.lookups[number][0] for number in gradients}
        for group, of_group in enumerate(numbers):
            present = [number for number in of_group if number in gradients]
            if present:
                values = batch.summed(group, present, [gradients[number] for number in present])
                values = values if scale == 1 else values.mul_(scale)
                before = self._sums.values[group]
                self._sums.values[group] = values if before is None else before.add_(values)

    def drop(self, name: str) -> None:
        """Drop the gradient of a table."""
        self._split_sums()
        self._pieces.pop(name, None)
        self.touched.discard(name)

    def clear(self) -> None:
        """Drop all gradients: they are reduced."""
        self._sums = None
        self._pieces.clear()
        self.touched.clear()

    def of_table(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the slots of a table that have a gradient, and their sums."""
        self._split_sums()
        pieces = self._pieces.get(name, ())
        if not pieces:
            return None
        slots = [piece.slots_of(name) for piece in pieces]
        values = [piece.values for piece in pieces]
        return merged(slots, values) if len(pieces) > 1 else (slots[0], values[0])

    def collect(self, last_batch: Batch | None, only: set[str] | None = None) -> RowGradients:
        """Return what goes to the owners: of all tables, or of those in `only`."""
        if only is None and last_batch is not None and self._are_of(last_batch):
            return self._of_batch(last_batch)
        space = self._tables.space
        values: list[list[Tensor]] = [[] for _ in self._tables.groups]
        keys: list[Tensor] = []
        for position, name in enumerate(space.names):
            found = self.of_table(name) if only is None or name in only else None
            if found is not None:
                keys.append(found[0] + int(space.first_keys[position]))
                values[space.group_of[position]].append(found[1])
        joined = [
            each[0] if len(each) == 1 else torch.cat([group.rows[:0], *each])
            for each, group in zip(values, self._tables.groups, strict=True)
        ]
        nothing = torch.empty(0, dtype=torch.int64, device=space.device)
        found_keys = keys[0] if len(keys) == 1 else torch.cat([nothing, *keys])
        return RowGradients(Keys(found_keys, space.count(found_keys)), joined)

    def _are_of(self, batch: Batch) -> bool:
        """Whether the rows that have a gradient are exactly those of a batch."""
        if batch.space is not self._tables.space or batch.indices is None:
            return False
        sums = self._sums
        if sums is not None and sums.batch is not batch:
            return False
        if [1 for pieces in self._pieces.values() for piece in pieces if piece.batch is not batch]:
            return False
        names = self._pieces.keys() | (set() if sums is None else sums.names)
        sizes = batch.request.counts.sum(1).tolist()
        missing = [
            name
            for name, size in zip(batch.space.names, sizes, strict=True)
            if size and name not in names
        ]
        return not missing

    def _of_batch(self, batch: Batch) -> RowGradients:
        """Return the gradients of all rows of a batch."""
        sums, values = self._sums, []
        for group, storage in enumerate(self._tables.storages):
            found = None if sums is None else sums.values[group]
            if found is None:
                found = storage.new_zeros((batch.num_rows(group), *storage.shape[1:]))
            values.append(found)
        for name, pieces in self._pieces.items():
            group, first, end = batch.range_of(name)
            for piece in pieces:
                values[group][first:end].add_(piece.values)
        return RowGradients(batch.request, values, batch)

    def _split_sums(self) -> None:
        """Keep the sums of a batch's rows table by table from now on."""
        sums, self._sums = self._sums, None
        if sums is None:
            return
        for name in sums.names:
            group, first, end = sums.batch.range_of(name)
            values = sums.values[group]
            assert values is not None
            self.add(name, values[first:end], None, sums.batch.slots_of(name))
