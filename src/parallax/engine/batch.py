"""A batch whose rows were prefetched, for as long as its lookups can take them.

[Note: gather] All lookups of a batch that only want the rows of their ids (`F.embedding`,
`weight[ids]`) are answered by one gather: each gets a part of its result. Autograd then brings all
their gradients in one call, and one sum by row is what is pushed.
Other lookups (`F.embedding_bag`, a padding row in the batch) take the distinct rows of their table.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from parallax.comm.pull import Asked, Pulled
from parallax.tables.merge import sum_rows
from parallax.tables.space import Request, SlotSpace

ExpectedLookup = tuple[str, Tensor, int, Tensor]
"""Name of the table, the part of the batch that has the ids, its version (-1: changes of it cannot
be seen), and a flat copy of the ids, 64 bits each, because a script may change its batch in place.
A tuple, because there are many."""


def expected_lookups(
    sources: list[tuple[str, Tensor]], device: torch.device
) -> list[ExpectedLookup]:
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
        pulled: Pulled,
        lookups: list[ExpectedLookup],
        tables: set[str],
        *,
        indices: Tensor | None,
        orders: list[Tensor | None],
    ) -> None:
        """`lookups` are ordered by table. `tables` are those of which all workers have their
        rows. `indices` and `orders` are those of the pull, if it was for this worker alone: then
        a push of all these rows needs no ids."""
        self.space = space
        self.request = request
        self.open = tables
        """Tables whose lookups need no message. See [Note: window] in prefetcher.py."""
        self.used: set[str] = set()
        """Tables of which a lookup has taken rows."""
        self.lookups = lookups
        self.indices = indices
        self.orders = orders
        self._pulled = pulled
        self._by_name: dict[str, list[int]] = {}
        """By table: numbers of its lookups."""
        for number, lookup in enumerate(lookups):
            self._by_name.setdefault(lookup[0], []).append(number)
        self._starts = [0, *itertools.accumulate([len(lookup[3]) for lookup in lookups])]
        """By lookup: where its ids begin."""
        self._group_edges: list[int] = [0, *request.starts[space.group_ends].tolist()]
        """By group: where its keys begin."""
        self._num_ids = [0] * space.num_groups
        """By group."""
        for name, _, _, ids in lookups:
            self._num_ids[space.group_of[space.positions[name]]] += len(ids)
        self.is_gathered = False
        """Whether the lookups were gathered once. See [Note: gather]."""
        self.gathered: dict[int, Tensor] = {}
        """By lookup: its rows as a part of a recorded graph, until it takes them."""

    @property
    def asked(self) -> Asked:
        """What all workers asked this owner for."""
        return self._pulled.asked

    def match(self, name: str, ids: Tensor) -> int | None:
        """Return the number of the lookup of a table with these ids, if it was expected."""
        if name not in self.open or not isinstance(ids, Tensor):
            return None
        for number in self._by_name.get(name, ()):
            _, source, version, copy = self.lookups[number]
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
                return number
        return None

    # One gather for all lookups -----------------------------------------------------------

    def gather(self, numbers: list[list[int]]) -> list[Tensor]:
        """Return the rows of the ids of some lookups, given by group, in one gather for each."""
        found: list[Tensor] = []
        for group, chosen in enumerate(numbers):
            if chosen:
                rows, where = self._pulled.rows[group], self._pulled.places[group]
                places = self._in_group(group, chosen)
                gathered = rows.index_select(0, places if where is None else where[places])
                sizes = [len(self.lookups[number][3]) for number in chosen]
                # They are not marked as views, so a script may change one in place.
                found += torch.unsafe_split_with_sizes(gathered, sizes)
        return found

    def summed(self, group: int, numbers: list[int], gradients: list[Tensor]) -> Tensor:
        """Sum the gradients of some lookups of a group by row; return them in the order of keys."""
        row_shape, request = self._pulled.rows[group].shape[1:], self.request
        joined = torch.cat([each.reshape(-1, *row_shape) for each in gradients])
        first, end = self._group_edges[group : group + 2]
        low, high = self._starts[numbers[0]], self._starts[numbers[-1] + 1]
        if not len(joined) == high - low == self._num_ids[group] or not joined.numel():
            sums = joined.new_zeros((end - first, *row_shape))
            return sums.index_add_(0, self._in_group(group, numbers), joined)
        order, firsts = request.order[low:high], request.firsts[first:end]
        if low:
            order, firsts = order - low, firsts - low
        return sum_rows(joined.reshape(len(joined), -1), order, firsts).view(-1, *row_shape)

    def _in_group(self, group: int, numbers: list[int]) -> Tensor:
        """Return where the rows of some lookups are among the keys of their group."""
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            places = self.request.places[self._starts[numbers[0]] : self._starts[numbers[-1] + 1]]
        else:
            places = torch.cat([self._places(number) for number in numbers])
        first = self._group_edges[group]
        return places - first if first else places

    def _places(self, number: int) -> Tensor:
        """Return where the row of each id of a lookup is among all keys."""
        return self.request.places[self._starts[number] : self._starts[number + 1]]

    # Rows of one table --------------------------------------------------------------------

    def rows_of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a table's slots and rows."""
        group, first, end = self.range_of(name)
        rows, where = self._pulled.rows[group], self._pulled.places[group]
        if where is None:
            return self.slots_of(name), rows[first:end]
        return self.slots_of(name), rows.index_select(0, where[first:end])

    def num_rows(self, group: int) -> int:
        return self._group_edges[group + 1] - self._group_edges[group]

    def range_of(self, name: str) -> tuple[int, int, int]:
        """Return a table's group, and where its keys begin and end in it."""
        position = self.space.positions[name]
        first, end = self.request.starts[position : position + 2].tolist()
        group = self.space.group_of[position]
        start = self._group_edges[group]
        return group, first - start, end - start

    def slots_of(self, name: str) -> Tensor:
        """Return the slots of a table's rows."""
        position = self.space.positions[name]
        first, end = self.request.starts[position : position + 2].tolist()
        return self.request.keys[first:end] - int(self.space.first_keys[position])

    def places_of(self, number: int) -> Tensor:
        """Return where the ids of a lookup are among the rows of its table."""
        name = self.lookups[number][0]
        return self._places(number) - int(self.request.starts[self.space.positions[name]])

    def padding_place(self, name: str, row: int) -> int | None:
        """Return where a padding row is among a table's rows."""
        position = self.space.positions[name]
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
