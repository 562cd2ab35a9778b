"""The manifest: the one file whose replacement makes a checkpoint valid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallax.errors import CheckpointError
from parallax.tables.rowmap import RowMap

DENSE = "dense.pt"
_NAME = "manifest.json"
_FORMAT = "parallax-checkpoint"
_VERSION = 2
_FOLDER = re.compile(r"step-\d{8,}-[0-9a-f]{16}")
_FILE = re.compile(r"dense\.pt|part-\d{5,}-of-\d{5,}\.pt")


def part_name(rank: int, num_workers: int) -> str:
    return f"part-{rank:05d}-of-{num_workers:05d}.pt"


def folder_name(step: int, token: int) -> str:
    return f"step-{step:08d}-{token:016x}"


def has_manifest(path: Path) -> bool:
    return (path / _NAME).is_file()


def made_by_save(path: Path) -> list[Path]:
    """All that lies in a folder, in the order to remove it; nothing if any of it is not ours."""
    manifests: list[Path] = []
    folders: list[Path] = []
    files: list[Path] = []
    for each in path.iterdir():
        if each.is_symlink():
            return []
        if each.name in (_NAME, f".{_NAME}.new") and each.is_file():
            manifests.append(each)
        elif _FOLDER.fullmatch(each.name) and each.is_dir():
            folders.append(each)
            files += each.iterdir()
        else:
            return []
    if not all(_FILE.fullmatch(each.name) and each.is_file() for each in files):
        return []
    try:
        current_folder(path)
    except CheckpointError:
        return []
    return [*manifests, *files, *folders]


def folders_in(path: Path) -> list[Path]:
    """Folders that a save made there, complete or not."""
    return [each for each in path.iterdir() if _FOLDER.fullmatch(each.name) and each.is_dir()]


@dataclass(frozen=True)
class FileRecord:
    """What tells a file from a damaged one."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    folder: str
    num_workers: int
    step: int
    files: Mapping[str, FileRecord]
    tables: Mapping[str, RowMap]
    """Of each sharded table: which part has which row, at which place. Loading goes by this map,
    whatever map this release would choose. See [Note: slots] in tables/rowmap.py."""

    @property
    def digest(self) -> int:
        """A checksum of the manifest itself."""
        return zlib.crc32(json.dumps(asdict(self), sort_keys=True).encode())

    def write(self, path: Path) -> None:
        """Replace the manifest in `path`, in one step."""
        fields = {"format": _FORMAT, "version": _VERSION, **asdict(self), "crc32": self.digest}
        temporary = path / f".{_NAME}.new"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(fields, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path / self.folder)
        os.replace(temporary, path / _NAME)
        sync_folder(path)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        fields = _fields(path)
        if fields.get("version") != _VERSION:
            raise CheckpointError(
                f"checkpoint {str(path)!r} has version {fields.get('version')}; this release reads "
                f"version {_VERSION}. Export it with the release that wrote it"
            )
        tables = _tables(fields, path)
        try:
            files = {name: FileRecord(**record) for name, record in fields["files"].items()}
            manifest = cls(fields["folder"], fields["num_workers"], fields["step"], files, tables)
            intact = manifest.digest == fields["crc32"]
        except (KeyError, TypeError, AttributeError):
            intact = False
        if not intact:
            raise CheckpointError(
                f"checkpoint {str(path)!r} is damaged: its {_NAME} was changed. Use another "
                "checkpoint"
            )
        return manifest


def _tables(fields: dict[str, Any], path: Path) -> dict[str, RowMap]:
    """Read the row map of each sharded table."""
    try:
        return {
            name: _row_map(record, fields["num_workers"])
            for name, record in fields["tables"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} is damaged: its {_NAME} does not say where the rows of the "
            f"tables are ({type(error).__name__}: {error}). Use another checkpoint"
        ) from error


def _row_map(record: dict[str, Any], num_workers: int) -> RowMap:
    num_rows, multiplier = record["num_rows"], record["multiplier"]
    boundaries = tuple(record["boundaries"])
    if not all(type(number) is int for number in (num_rows, multiplier, *boundaries)):
        raise TypeError(f"{record} has other things than whole numbers")
    if len(boundaries) != num_workers + 1:
        raise ValueError(f"{len(boundaries)} boundaries for {num_workers} parts")
    return RowMap(num_rows, boundaries, multiplier)


def current_folder(path: Path) -> str | None:
    """The folder that the manifest names, if there is one. Refuses a foreign manifest."""
    if not (path / _NAME).exists():
        return None
    name = _fields(path).get("folder")
    return name if isinstance(name, str) else None


def _fields(path: Path) -> dict[str, Any]:
    file = path / _NAME
    if not file.is_file():
        raise CheckpointError(
            f"{str(path)!r} holds no checkpoint: there is no {_NAME}. Give the folder that was "
            "given to session.save()"
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(file)!r} is damaged, or not of Parallax: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise CheckpointError(f"{str(path)!r} is not a checkpoint of Parallax: see its {_NAME}")
    return fields


def sync_folder(path: Path) -> None:
    """Make new names in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
