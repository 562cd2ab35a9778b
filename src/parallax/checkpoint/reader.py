"""A checkpoint on disk."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.checkpoint.manifest import DENSE, Manifest, part_name
from parallax.errors import CheckpointError
from parallax.tables.merge import put_rows
from parallax.tables.rowmap import RowMap

_BLOCK_BYTES = 1 << 20
_BLOCK_ELEMENTS = 1 << 22


class Reader:
    """The files of a checkpoint, mapped into memory: reading rows reads those rows."""

    def __init__(self, path: Path) -> None:
        self.manifest = Manifest.read(path)
        self.path = path
        self._folder = path / self.manifest.folder
        for name, record in self.manifest.files.items():
            self._check_size(name, record.size_bytes)

    def verify(self, names: Iterable[str]) -> None:
        """Compare the checksums of some files; reads them, block by block."""
        for name in names:
            crc32 = 0
            with (self._folder / name).open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    crc32 = zlib.crc32(block, crc32)
            if crc32 != self.manifest.files[name].crc32:
                raise self._damaged(f"the content of {name} was changed")

    def open(self) -> None:
        """Map the files. Call it when they are verified."""
        num_workers = self.manifest.num_workers
        self.dense = self._mapped(DENSE)
        self.parts = [self._mapped(part_name(rank, num_workers)) for rank in range(num_workers)]
        for rank, part in enumerate(self.parts):
            self._check_rows(rank, part["rows"])

    @property
    def names(self) -> set[str]:
        """Of all parameters."""
        return {*self.dense["parameters"], *self.parts[0]["rows"]}

    def parameter(self, name: str) -> Saved:
        if name in self.dense["parameters"]:
            return Saved([self.dense["parameters"][name]])
        return Saved([part["rows"][name] for part in self.parts], self.manifest.tables[name])

    def state(self, name: str) -> dict[str, Any]:
        """What the optimizer kept of a parameter; what lies by row comes as `Saved`."""
        shape = self.parameter(name).shape
        found: dict[str, Any] = {}
        for key, value in self.dense["state"][name].items():
            by_row = isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape
            found[key] = Saved([value]) if by_row else value
        for key in self.parts[0]["state"].get(name, {}):
            parts = [part["state"][name][key] for part in self.parts]
            found[key] = Saved(parts, self.manifest.tables[name])
        return found

    def tensor(self, name: str) -> Tensor:
        """A parameter or a buffer, whole."""
        buffer: Tensor | None = self.dense["buffers"].get(name)
        return self.parameter(name).whole() if buffer is None else buffer

    def _check_size(self, name: str, size_bytes: int) -> None:
        file = self._folder / name
        if not file.is_file():
            raise self._damaged(f"{name} is missing")
        actual = file.stat().st_size
        if actual != size_bytes:
            raise self._damaged(f"{name} has {actual} bytes instead of {size_bytes}")

    def _check_rows(self, rank: int, rows: dict[str, Tensor]) -> None:
        tables = self.manifest.tables
        if rows.keys() != tables.keys():
            name = min(rows.keys() ^ tables.keys())
            raise self._damaged(f"only one of manifest.json and the parts has the table {name!r}")
        for name, part in rows.items():
            if len(part) != tables[name].size_of(rank):
                raise self._damaged(
                    f"part {rank} has {len(part)} rows of {name!r} instead of the "
                    f"{tables[name].size_of(rank)} in manifest.json"
                )

    def _mapped(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        try:
            content: dict[str, Any] = torch.load(
                file, map_location="cpu", weights_only=True, mmap=True
            )
        except pickle.UnpicklingError as error:
            # Torch's own words would advise to read it without this guard.
            raise self._damaged(
                f"{name} holds other things than tensors and plain values, and is not read"
            ) from error
        except Exception as error:  # torch raises many kinds for a file that is none of its own
            raise self._damaged(f"{name} cannot be read ({error})") from error
        return content

    def _damaged(self, how: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {str(self.path)!r} is damaged: {how}. Use another checkpoint"
        )


@dataclass(frozen=True)
class Saved:
    """A tensor as it lies in a checkpoint: whole, or by rows over K owners."""

    parts: Sequence[Tensor]
    row_map: RowMap | None = None
    """Which of the parts has which row; None for a whole tensor."""

    @property
    def shape(self) -> torch.Size:
        if self.row_map is None:
            return self.parts[0].shape
        return torch.Size((self.row_map.num_rows, *self.parts[0].shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def whole(self) -> Tensor:
        """Return all rows in the order of ids."""
        if self.row_map is None:
            return self.parts[0]
        result = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(result)
        return result

    def copy_to(self, target: Tensor) -> None:
        """Put all rows into a whole tensor."""
        if self.row_map is None:
            target.copy_(self.parts[0])
        else:
            self.copy_part_to(target, _in_order_of_ids(len(target)), 0)

    def copy_part_to(self, target: Tensor, now: RowMap, owner: int) -> None:
        """Put the rows of an owner of `now` into its shard."""
        then = self.row_map or _in_order_of_ids(now.num_rows)
        for part, first in zip(self.parts, then.boundaries[:-1], strict=True):
            if then.multiplier == now.multiplier:
                _copy_block(part, first, target, now.first(owner))
            else:
                _copy_scattered(part, first, then, target, now, owner)


def _in_order_of_ids(num_rows: int) -> RowMap:
    return RowMap(num_rows, (0, num_rows), multiplier=1)


def _copy_block(source: Tensor, first_then: int, target: Tensor, first_now: int) -> None:
    """Copy the slots that two shards have in common. Both are given with their first slot."""
    first = max(first_then, first_now)
    end = min(first_then + len(source), first_now + len(target))
    if first < end:
        target[first - first_now : end - first_now].copy_(
            source[first - first_then : end - first_then]
        )


def _copy_scattered(
    source: Tensor, first_slot: int, then: RowMap, target: Tensor, now: RowMap, owner: int
) -> None:
    """Copy the rows that two shards have in common, if the slots of rows have changed.

    Files are read from beginning to end, block by block; the rows are scattered in memory.
    """
    size = max(1, _BLOCK_ELEMENTS // max(1, source.shape[1:].numel()))
    for start in range(0, len(source), size):
        rows = source[start : start + size]
        first = first_slot + start
        places = now.slots(then.ids(torch.arange(first, first + len(rows)))) - now.first(owner)
        here = ((places >= 0) & (places < len(target))).nonzero().squeeze(1)
        rows = rows.index_select(0, here).to(target.device, target.dtype)
        put_rows(target, places[here].to(target.device), rows)
