"""One slot space for all sharded tables of a session.

[Note: keys] Tables stand one behind the other in a fixed order, those of a group side by side. A
*key* is a table's first key plus the slot of a row (see [Note: slots] in rowmap.py). Sorted keys
are therefore ordered by group, table, owner and place, and one sort deduplicates the ids of all
lookups of a batch. An owner keeps the rows of all tables in the same order, so each key also has an
*index* there: `key + shift[table, owner]`. Messages carry indices, 32 bits each, ordered by owner
and then by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallax.tables.host import Counts, repeat, starts_of, to_device, to_host
from parallax.tables.rowmap import RowMap

_MAX_LAYOUTS = 16


@dataclass(frozen=True)
class Keys:
    """Distinct, sorted keys, and how many of them each owner has."""

    keys: Tensor
    counts: Counts
    """By table and owner."""

    @property
    def starts(self) -> Counts:
        """By table: where its keys begin; one more at the end."""
        found: Counts = np.append(0, self.counts.sum(1).cumsum())
        return found


@dataclass(frozen=True)
class Request(Keys):
    """The distinct rows of one or several lookups."""

    places: Tensor
    """For each id, in the order of the lookups: where its key is among `keys`."""
    order: Tensor
    """The ids in the order of keys; those of a key side by side and otherwise as they were."""
    firsts: Tensor
    """By key: where its ids begin in `order`."""
    is_faulty: bool
    """Some id is out of range."""
    paddings: Counts
    """By padding row of the space: where it is among `keys`, or -1."""


@dataclass(frozen=True)
class _Constants:
    """What requests need of a space, on its device."""

    edges: Tensor
    """The first key of each table and owner, and the end."""
    shifts: Tensor
    """By table and owner: index less key."""
    num_rows: Tensor
    multipliers: Tensor
    first_keys: Tensor
    padding_keys: Tensor


class SlotSpace:
    """The tables that are sharded now, and where their rows lie. See [Note: keys].

    A space never changes: when a table comes or goes, another one takes its place.
    """

    def __init__(
        self,
        names: Sequence[str],
        maps: Sequence[RowMap],
        groups: Sequence[int],
        rank: int,
        device: torch.device,
        paddings: Sequence[Sequence[int]] = (),
    ) -> None:
        """`groups[i]` is the number of tables in group i. `paddings` are rows by table."""
        self.names = tuple(names)
        self.maps = list(maps)
        self.positions = {name: position for position, name in enumerate(self.names)}
        self.num_tables = len(self.maps)
        self.num_workers = self.maps[0].num_workers if self.maps else rank + 1
        self.device = device
        self.group_ends: Counts = np.array(groups, np.int64).cumsum()
        """By group: the number of the first table behind it."""
        self._group_starts: Counts = self.group_ends - np.array(groups, np.int64)
        self.group_of: list[int] = np.repeat(np.arange(len(groups)), groups).tolist()
        """By table."""
        bounds = np.array([m.boundaries for m in self.maps], np.int64)
        bounds = bounds.reshape(self.num_tables, self.num_workers + 1)
        sizes = np.diff(bounds)
        rows = np.array([m.num_rows for m in self.maps], np.int64)
        self.first_keys: Counts = starts_of(rows)
        self.num_keys = int(rows.sum())
        self.offsets: Counts = sizes.cumsum(0) - sizes
        """By table and owner: the index of the table's first row there."""
        self.num_rows_here = int(sizes[:, rank].sum())
        starts = self.offsets[:, rank]
        self.first_indices: list[int] = starts[self._group_starts].tolist()
        """By group: the index of its first row here."""
        first_keys = self.first_keys[:, None] + bounds[:, :-1]
        self.padding_of: dict[tuple[int, int], int] = {}
        """(table, row) → number of a padding row."""
        for table, padding_rows in enumerate(paddings):
            for row in padding_rows:
                self.padding_of[table, row] = len(self.padding_of)
        paddings_at = [self.first_keys[t] + self.maps[t].slot(row) for t, row in self.padding_of]
        self._constants = _Constants(
            to_device(np.append(first_keys.ravel(), self.num_keys), device),
            to_device((self.offsets - first_keys).ravel(), device),
            to_device(rows, device),
            to_device(np.array([m.multiplier for m in self.maps], np.int64), device),
            to_device(self.first_keys, device),
            to_device(np.array(paddings_at, np.int64), device),
        )
        self._layouts: dict[object, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def num_groups(self) -> int:
        return len(self.group_ends)

    def group_sums(self, counts: Counts) -> Counts:
        """Add up, for each group, what an array has for each of its tables."""
        found: Counts = np.add.reduceat(counts, self._group_starts, axis=0)
        return found

    def by_table(self, values: Sequence[int]) -> Counts:
        """Return for each table what `values` has for its group."""
        found: Counts = np.repeat(values, self.group_ends - self._group_starts)
        return found

    def request(self, tables: Sequence[int], ids: Sequence[Tensor]) -> Request:
        """Deduplicate the ids of some lookups, each of one table. The only host wait is for the
        counts."""
        joined = torch.cat([each.reshape(-1) for each in ids]).long()
        rows, multipliers, first_keys = self._layout(tables, [each.numel() for each in ids])
        is_bad = (joined < 0) | (joined >= rows)
        keys = (joined * multipliers).remainder_(rows).add_(first_keys)
        ordered, order = torch.sort(keys, stable=True)
        seen = num_distinct(ordered)
        at = [seen[torch.searchsorted(ordered, self._constants.edges)], is_bad.sum()[None]]
        if len(self._constants.padding_keys):
            at += self._find_paddings(ordered, seen)
        told = to_host(torch.cat(at))
        num_edges = len(self._constants.edges)
        counts = np.diff(told[:num_edges]).reshape(self.num_tables, self.num_workers)
        ranks = seen[1:] - 1
        places = torch.empty_like(order).scatter_(0, order, ranks)
        firsts = first_of_each(seen, int(told[num_edges - 1]))
        return Request(
            ordered[firsts],
            counts,
            places,
            order,
            firsts,
            bool(told[num_edges]),
            told[num_edges + 1 :],
        )

    def count(self, keys: Tensor) -> Counts:
        """Count sorted keys by table and owner."""
        edges = to_host(torch.searchsorted(keys, self._constants.edges))
        found: Counts = np.diff(edges).reshape(self.num_tables, self.num_workers)
        return found

    def indices(self, found: Keys) -> Tensor:
        """Return where each key's row is with its owner; in the order of the keys."""
        return found.keys + repeat(self._constants.shifts, found.counts.ravel())

    def owners(self, counts: Counts) -> Tensor:
        """Return the owner of each key."""
        workers = torch.arange(self.num_workers, device=self.device).repeat(self.num_tables)
        return repeat(workers, counts.ravel())

    def _layout(self, tables: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, multiplier and first key for each id. Batches of one shape share it."""
        key = (*tables, *sizes)
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            chosen = torch.tensor(list(tables), device=self.device)
            counts = np.array(sizes, np.int64)
            constants = self._constants
            values = (constants.num_rows, constants.multipliers, constants.first_keys)
            rows, multipliers, firsts = (repeat(each[chosen], counts) for each in values)
            found = self._layouts[key] = rows, multipliers, firsts
        return found

    def _find_paddings(self, ordered: Tensor, seen: Tensor) -> list[Tensor]:
        wanted = self._constants.padding_keys
        if not len(ordered):
            return [torch.full_like(wanted, -1)]
        at = torch.searchsorted(ordered, wanted)
        is_there = ordered[at.clamp(max=len(ordered) - 1)] == wanted
        return [torch.where(is_there, seen[at], -1)]


def num_distinct(ordered: Tensor) -> Tensor:
    """Return, for each length of a sorted tensor's beginning, how many distinct values it has."""
    seen = torch.zeros(len(ordered) + 1, dtype=torch.int64, device=ordered.device)
    if len(ordered):
        seen[1] = 1
        torch.cumsum(ordered[1:] != ordered[:-1], 0, out=seen[2:]).add_(1)
    return seen


def first_of_each(seen: Tensor, number: int) -> Tensor:
    """Return where each distinct value begins in a sorted tensor, of which `num_distinct` returned
    `seen`. The number of distinct values is given, so no device is waited for."""
    if seen.is_cpu:
        return torch.from_numpy(np.flatnonzero(np.diff(seen.numpy())))
    return torch.searchsorted(seen[1:], torch.arange(1, number + 1, device=seen.device))


def by_owner(counts: Counts, device: torch.device) -> Tensor | None:
    """Return where rows that are ordered by table and owner lie when ordered by owner and table.

    `counts` is by table and owner. None: the two orders are the same.
    """
    if counts.shape[0] <= 1 or counts.shape[1] <= 1:
        return None
    before = starts_of(counts.ravel())
    by_column = counts.T.ravel()
    after = starts_of(by_column).reshape(counts.T.shape).T.ravel()
    moved = repeat(to_device(after - before, device), counts.ravel())
    return moved.add_(torch.arange(len(moved), device=device))
