"""Which part of a batch reaches a lookup: found by looking, used on the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_KINDS = (torch.int64, torch.int32, torch.int16)
_MAX_COLUMNS = 64


@dataclass(frozen=True)
class View:
    """A part of a tensor as scripts cut it: all of it, without its first or last, one column."""

    dim: int = 0
    start: int = 0
    drop: int = 0
    """How many are left out at the end."""
    column: int | None = None

    def of(self, tensor: Tensor) -> Tensor | None:
        if self.column is not None:
            fits = tensor.dim() > self.dim and tensor.shape[self.dim] > self.column
            return tensor.select(self.dim, self.column) if fits else None
        if not self.start and not self.drop:
            return tensor
        length = tensor.shape[self.dim] - self.start - self.drop if tensor.dim() > self.dim else -1
        return tensor.narrow(self.dim, self.start, length) if length >= 0 else None


@dataclass(frozen=True)
class Recipe:
    """The ids of a lookup: a view of the batch's tensor number `leaf`."""

    leaf: int
    view: View

    def ids(self, leaves: list[Tensor]) -> Tensor | None:
        return self.view.of(leaves[self.leaf]) if self.leaf < len(leaves) else None


Columns = dict[tuple[int, int] | None, tuple[Tensor, ...]]
"""(leaf, dimension) → its columns, which are often looked up one by one."""


@dataclass(frozen=True)
class Source:
    """Where the ids of a table's lookups come from: a part of the batch, or a function of it."""

    recipe: Recipe | None = None
    function: Callable[[Any], Any] | None = None
    leaf: tuple[int, int] | None = None
    """Of a column: the leaf and the dimension …"""
    column: int | None = None
    """… and its number."""

    @staticmethod
    def of(recipe: Recipe) -> Source:
        view = recipe.view
        leaf = None if view.column is None else (recipe.leaf, view.dim)
        return Source(recipe, leaf=leaf, column=view.column)

    def parts(self, batch: Any, leaves: list[Tensor], columns: Columns) -> list[Tensor | None]:
        """Return the ids of each lookup; None where they cannot be told. Remember the columns of a
        leaf."""
        if self.recipe is not None:
            found = self.recipe.ids(leaves)
            if found is not None and self.leaf is not None:
                columns[self.leaf] = leaves[self.leaf[0]].unbind(self.leaf[1])
            return [found]
        assert self.function is not None
        answer = self.function(batch)
        parts = list(answer) if isinstance(answer, tuple | list) else [answer]
        return [p if isinstance(p, Tensor) and p.dtype in _KINDS else None for p in parts]


def leaves_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch that may hold ids, in one order for all batches of a structure."""
    return list(_leaves(batch))


def find_recipe(ids: Tensor, leaves: list[Tensor]) -> Recipe | None:
    """By their values: a script may have copied the batch to its device."""
    wanted, found = ids.reshape(-1), None
    for number, leaf in enumerate(leaves):
        for view in _views(leaf):
            part = view.of(leaf)
            if part is None or part.numel() != len(wanted) or not _equal(part, wanted):
                continue
            if part.shape == ids.shape:
                return Recipe(number, view)
            found = found or Recipe(number, view)
    return found


def _equal(part: Tensor, wanted: Tensor) -> bool:
    return torch.equal(part.reshape(-1).to(wanted.device, wanted.dtype), wanted)


def _views(leaf: Tensor) -> Iterator[View]:
    yield View()
    for dim in range(leaf.dim()):
        yield View(dim, drop=1)
        yield View(dim, start=1)
    if leaf.dim() == 2 and leaf.shape[1] <= _MAX_COLUMNS:
        for column in range(leaf.shape[1]):
            yield View(1, column=column)


def _leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dtype in _KINDS and batch.layout is torch.strided and not batch.is_nested:
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _leaves(value)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from _leaves(getattr(batch, field.name))
