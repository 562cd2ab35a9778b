"""Rows of several tables in the order of their owners; sums of equal rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax.tables.rowmap import RowMap


@dataclass(frozen=True)
class Atlas:
    """Several tables as if they were one: the slots of each begin where the last one's end."""

    num_rows: Tensor
    multipliers: Tensor
    starts: Tensor
    """By table: its first slot."""
    bounds: Tensor
    """By table and owner: the owner's first slot."""

    @staticmethod
    def of(maps: Sequence[RowMap]) -> Atlas:
        return _atlas(tuple(maps))

    def keys(self, slots: Sequence[Tensor]) -> Tensor:
        """The tables' slots, in one row."""
        joined = torch.cat(list(slots))
        if len(slots) == 1:
            return joined
        return joined + spread(self.starts, [each.size(0) for each in slots], joined.device)


@functools.lru_cache(maxsize=32)
def _atlas(maps: tuple[RowMap, ...]) -> Atlas:
    """Made once: the same tables are met in every step."""
    with torch.device("cpu"):  # Whatever a script has as its default.
        num_rows = torch.tensor([row_map.num_rows for row_map in maps])
        multipliers = torch.tensor([row_map.multiplier for row_map in maps])
        starts = num_rows.cumsum(0) - num_rows
        firsts = torch.tensor([row_map.boundaries[:-1] for row_map in maps])
        return Atlas(num_rows, multipliers, starts, starts[:, None] + firsts)


def spread(values: Tensor, sizes: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Each value as many times as `sizes` says."""
    sizes = sizes if isinstance(sizes, Tensor) else torch.tensor(sizes)
    return torch.repeat_interleave(values, sizes).to(device)


def laid_out(maps: Sequence[RowMap], slots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Of several tables' sorted slots: how many each owner has, and their places, by table."""
    atlas = Atlas.of(maps)
    keys, bounds = atlas.keys(slots), atlas.bounds.flatten()
    edges = torch.searchsorted(keys, bounds.to(keys.device)).cpu()
    counts = torch.diff(edges, append=edges.new_tensor([len(keys)]))
    return counts.reshape(atlas.bounds.shape), keys - spread(bounds, counts, keys.device)


@dataclass(frozen=True)
class Merge:
    """Which of some rows are the same one. It is known before the rows' values have come."""

    slots: Tensor
    """Distinct and sorted."""
    order: Tensor
    """The rows, those of a slot beside each other and otherwise in the order they had."""
    starts: Tensor
    """Where those of each slot begin."""

    @staticmethod
    def of(slots: Tensor) -> Merge:
        ordered, order = torch.sort(slots, stable=True)
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
        starts = is_first.nonzero().squeeze(1)
        return Merge(ordered[starts], order, starts)

    def summed(self, values: Tensor, scale: float = 1.0) -> Tensor:
        """The sum for each slot, times `scale`."""
        total = values.new_empty((len(self.slots), *values.shape[1:]))
        if not total.numel():
            return total
        # It reads every row once and writes every sum once; `index_add_` takes three times as long.
        weights = values.new_full((len(self.order),), scale)
        flat = values.reshape(len(values), -1)
        summed, *_ = torch.embedding_bag(flat, self.order, self.starts, False, 0, False, weights)
        return summed.reshape(total.shape)


def put_rows(target: Tensor, places: Tensor, rows: Tensor) -> None:
    """`target[places] = rows`. No place is there twice."""
    target, rows = _in_wide_elements(target, rows)
    target.index_copy_(0, places, rows)


def _in_wide_elements(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same bytes as fewer elements, if that can be: on a processor `index_copy_` goes element
    by element, and takes a third of the time for those of 16 bytes."""
    dtype = tensors[0].dtype
    if not all(each.dtype is dtype and _can_widen(each) for each in tensors):
        return tensors
    return tuple(each.view(torch.complex128) for each in tensors)


def _can_widen(tensor: Tensor) -> bool:
    if tensor.dim() < 2 or not tensor.is_cpu or tensor.stride(-1) != 1:
        return False
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    is_even = all(step * tensor.element_size() % _WIDE == 0 for step in steps)
    return is_even and tensor.data_ptr() % _WIDE == 0


_WIDE = torch.complex128.itemsize


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor, which is a view if they lie beside each other."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        is_next = part.is_contiguous() and part.storage_offset() == end
        if not is_next or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        end += part.numel()
    flat = first.as_strided((end - first.storage_offset(),), (1,))
    return flat.reshape(sum(part.size(0) for part in parts), *first.shape[1:])


def merged(slots: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum the values of equal slots; the result's slots are sorted."""
    merge = Merge.of(torch.cat(list(slots)))
    return merge.slots, merge.summed(torch.cat(list(values)))


def regrouped(sizes: Tensor) -> Tensor:
    """Where rows lie that are sorted by line and then column, when sorted by column first.

    `sizes[line, column]` is how many there are of each.
    """
    before = sizes.flatten().cumsum(0) - sizes.flatten()
    columns = sizes.t().flatten()
    after = (columns.cumsum(0) - columns).reshape(sizes.t().shape).t().flatten()
    moved = torch.repeat_interleave(after - before, sizes.flatten())
    return torch.arange(len(moved)) + moved
