"""A checkpoint on disk."""

from __future__ import annotations

import math
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
from parallax.shard import RowMap

_BLOCK_BYTES = 1 << 20


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

    @property
    def names(self) -> set[str]:
        """Of all parameters."""
        return {*self.dense["parameters"], *self.parts[0]["rows"]}

    def parameter(self, name: str) -> Saved:
        if name in self.dense["parameters"]:
            return Saved([self.dense["parameters"][name]])
        return Saved([part["rows"][name] for part in self.parts])

    def state(self, name: str) -> dict[str, Any]:
        """What the optimizer kept of a parameter; what lies by row comes as `Saved`."""
        shape = self.parameter(name).shape
        found: dict[str, Any] = {}
        for key, value in self.dense["state"][name].items():
            by_row = isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape
            found[key] = Saved([value]) if by_row else value
        for key in self.parts[0]["state"].get(name, {}):
            found[key] = Saved([part["state"][name][key] for part in self.parts])
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

    @property
    def shape(self) -> torch.Size:
        first = self.parts[0]
        if len(self.parts) == 1:
            return first.shape
        return torch.Size((sum(map(len, self.parts)), *first.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def whole(self) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0]
        result = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(result)
        return result

    def copy_to(self, target: Tensor) -> None:
        """Put all rows into a whole tensor."""
        if target.dim():
            self.copy_part_to(target, RowMap(len(target), 1), 0)
        else:
            target.copy_(self.parts[0])

    def copy_part_to(self, target: Tensor, now: RowMap, owner: int) -> None:
        """Put the rows of an owner among the N of now into its shard.

        The rows that an owner then and an owner now have in common are lcm(K, N) apart, so views
        with strides reach them: no list of ids, no copy between.
        """
        num_then, num_now = len(self.parts), now.num_workers
        apart = math.lcm(num_then, num_now)
        for first in range(owner, min(apart, now.num_rows), num_now):
            place, then = divmod(first, num_then)
            rows = self.parts[then][place :: apart // num_then]
            target[first // num_now :: apart // num_now].copy_(rows)
