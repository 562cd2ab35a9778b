"""The map from the rows of a table to their owners.

[Note: slots] A table of V rows has V *slots*. Row `id` is in the slot `a * id mod V`, where the
multiplier `a` is coprime to V, so every row has its own slot. It is about 0.618 V (the golden
ratio): then any run of ids spreads evenly over the slots. Owner i has the contiguous block of slots
`boundaries[i] .. boundaries[i + 1] - 1`; a row's *place* is its index in that block.

- The first ids of a vocabulary are often its hottest. They spread evenly over the owners, while
  blocks of ids would give all of them to one owner.
- Sorted slots are grouped by owner, so one `unique` deduplicates ids and arranges them for the
  exchange.
- A shard is one contiguous block of the slots, which DTensor and torch.distributed.checkpoint can
  describe. The slot of a row does not depend on the number of workers, so only blocks move when
  that number changes.

Shards may have any sizes, also none. Products of two numbers below V must fit into 64 bits, so a
table has less than 2**31 rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ROWS = 2**31 - 1
_GOLDEN = (math.sqrt(5) - 1) / 2


def multiplier_of(num_rows: int) -> int:
    """Return the number nearest to 0.618 * num_rows that is coprime to it."""
    if num_rows <= 2:
        return 1
    middle = round(_GOLDEN * num_rows)
    near = itertools.chain.from_iterable((middle - far, middle + far) for far in itertools.count())
    return next(each for each in near if 0 < each < num_rows and math.gcd(each, num_rows) == 1)


@dataclass(frozen=True)
class RowMap:
    """Which owner has which row, at which place. See [Note: slots]."""

    num_rows: int
    boundaries: tuple[int, ...]
    """Owner i has the slots boundaries[i] .. boundaries[i + 1] - 1."""
    multiplier: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_rows <= MAX_ROWS:
            raise ValueError(f"a table of {self.num_rows} rows; it can have up to {MAX_ROWS}")
        if not 0 < self.multiplier <= max(1, self.num_rows - 1):
            raise ValueError(f"multiplier {self.multiplier} for {self.num_rows} rows")
        if math.gcd(self.multiplier, self.num_rows) != 1:
            raise ValueError(f"multiplier {self.multiplier} is not coprime to {self.num_rows} rows")
        bounds = self.boundaries
        is_whole = len(bounds) > 1 and bounds[0] == 0 and bounds[-1] == self.num_rows
        if not is_whole or any(after < before for before, after in itertools.pairwise(bounds)):
            raise ValueError(f"boundaries {list(bounds)} for {self.num_rows} rows")

    @staticmethod
    def even(num_rows: int, num_workers: int) -> RowMap:
        """Return the map whose shards differ by one row at most, the larger ones first."""
        boundaries = tuple(-(-owner * num_rows // num_workers) for owner in range(num_workers + 1))
        return RowMap(num_rows, boundaries, multiplier_of(num_rows))

    @property
    def num_workers(self) -> int:
        return len(self.boundaries) - 1

    @functools.cached_property
    def inverse(self) -> int:
        """The number with `inverse * multiplier mod num_rows == 1`."""
        return pow(self.multiplier, -1, self._modulus)

    @functools.cached_property
    def largest(self) -> int:
        """Number of rows of the largest shard."""
        return max(self.size_of(owner) for owner in range(self.num_workers))

    def slots(self, ids: Tensor) -> Tensor:
        return (ids.long() * self.multiplier).remainder_(self._modulus)

    def slot(self, row: int) -> int:
        return row * self.multiplier % self._modulus

    def ids(self, slots: Tensor) -> Tensor:
        return (slots.long() * self.inverse).remainder_(self._modulus)

    def first(self, owner: int) -> int:
        """Return the first slot of an owner."""
        return self.boundaries[owner]

    def size_of(self, owner: int) -> int:
        """Return the number of rows of an owner."""
        return self.boundaries[owner + 1] - self.boundaries[owner]

    def owners(self, slots: Tensor) -> Tensor:
        return torch.bucketize(slots, self._bounds(slots.device)[1:-1], right=True)

    def places(self, slots: Tensor) -> Tensor:
        return slots - self._bounds(slots.device)[self.owners(slots)]

    def counts(self, sorted_slots: Tensor) -> list[int]:
        """Return how many of the sorted slots each owner has."""
        edges: list[int] = torch.searchsorted(
            sorted_slots, self._bounds(sorted_slots.device)
        ).tolist()
        return [after - before for before, after in itertools.pairwise(edges)]

    def ids_of(self, owner: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the ids of an owner's rows in the order of their places."""
        first, end = self.boundaries[owner : owner + 2]
        return self.ids(torch.arange(first, end, device=device))

    def part(self, whole: Tensor, owner: int) -> Tensor:
        """Return an owner's rows out of a whole table: a contiguous copy."""
        return whole.index_select(0, self.ids_of(owner, whole.device))

    def whole(self, parts: Tensor) -> Tensor:
        """Return all rows in the order of ids, given in the order of slots (shard after shard)."""
        return parts.index_select(0, self.slots(torch.arange(len(parts), device=parts.device)))

    @property
    def _modulus(self) -> int:
        return max(1, self.num_rows)  # A table without rows has no slot to compute.

    def _bounds(self, device: torch.device) -> Tensor:
        return _as_tensor(self.boundaries, device)


@functools.lru_cache(maxsize=256)
def _as_tensor(boundaries: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(boundaries, device=device)
