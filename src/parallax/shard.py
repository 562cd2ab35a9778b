"""One owner's rows of a table, and the map from rows to owners.

[Note: slots] Row `id` belongs to owner `id % N`, because the hottest rows of a vocabulary are its
first ones and contiguous ranges would make one owner hot. Its place there is `id // N`. A *slot*
is `owner · R + place` with R = ⌈V/N⌉: sorting slots groups rows by owner, so one `unique` both
deduplicates ids and lays them out for the exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowMap:
    """Which owner has which row, at which place. See [Note: slots]."""

    num_rows: int
    num_workers: int

    @property
    def span(self) -> int:
        """Places of the largest shard: the distance between two owners' slots."""
        return -(-self.num_rows // self.num_workers)

    def slots(self, ids: Tensor) -> Tensor:
        return ids % self.num_workers * self.span + torch.div(
            ids, self.num_workers, rounding_mode="floor"
        )

    def slot(self, row: int) -> int:
        return row % self.num_workers * self.span + row // self.num_workers

    def ids(self, slots: Tensor) -> Tensor:
        owners = torch.div(slots, self.span, rounding_mode="floor")
        return self.places(slots) * self.num_workers + owners

    def places(self, slots: Tensor) -> Tensor:
        return slots % self.span

    def counts(self, sorted_slots: Tensor) -> list[int]:
        """How many of the sorted slots each owner has."""
        bounds = torch.arange(
            0, (self.num_workers + 1) * self.span, self.span, device=sorted_slots.device
        )
        edges: list[int] = torch.searchsorted(sorted_slots, bounds).tolist()
        return [after - before for before, after in itertools.pairwise(edges)]

    def size_of(self, owner: int) -> int:
        """How many rows an owner has."""
        return max(0, -(-(self.num_rows - owner) // self.num_workers))

    def ids_of(self, owner: int, device: torch.device | str = "cpu") -> Tensor:
        """The rows of an owner, in the order of their places."""
        return torch.arange(self.size_of(owner), device=device) * self.num_workers + owner

    def part(self, whole: Tensor, owner: int) -> Tensor:
        """An owner's rows out of a whole table; a copy."""
        return whole[owner :: self.num_workers].clone(memory_format=torch.contiguous_format)


def merged(
    slots: Sequence[Tensor], values: Sequence[Tensor], scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Sum the values of equal slots, times `scale`; the result's slots are sorted.

    Piece by piece: concatenating the values first would copy all of them once more.
    """
    distinct, inverse = torch.unique(torch.cat(list(slots)), return_inverse=True)
    total = values[0].new_zeros((len(distinct), *values[0].shape[1:]))
    for places, piece in zip(inverse.split([len(v) for v in values]), values, strict=True):
        total.index_add_(0, places, piece, alpha=scale)
    return distinct, total
