"""save(): every worker writes its part, then rank 0 makes the whole valid."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn

from parallax.checkpoint.contents import Contents
from parallax.checkpoint.manifest import (
    DENSE,
    FileRecord,
    Manifest,
    current_folder,
    folder_name,
    folders_in,
    part_name,
)
from parallax.checkpoint.plain import plain
from parallax.checkpoint.together import SAVING, meet, together
from parallax.comm.peers import Peers
from parallax.errors import CheckpointError
from parallax.tables.group import is_by_row
from parallax.tables.rowmap import RowMap


def save(path: Path, contents: Contents, peers: Peers) -> None:
    """Collective. Until the last moment the checkpoint that was there stays the valid one."""
    where = f"saving the checkpoint {str(path)!r}"
    meet(peers, SAVING)
    folder = path / folder_name(contents.step, _token(peers))
    together(peers, where, lambda: _make(folder) if peers.rank == 0 else None)
    try:
        written = together(peers, where, lambda: _write_files(folder, contents, peers))
        files = _all_records(written, peers, where)
        tables = _row_maps(contents)
        manifest = Manifest(folder.name, peers.num_workers, contents.step, files, tables)
        together(peers, where, lambda: _commit(path, manifest) if peers.rank == 0 else None)
    except CheckpointError:
        # Every worker has stopped writing, and the manifest does not name this folder.
        if peers.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _token(peers: Peers) -> int:
    """A random name that all workers know, so that no save writes into another's folder."""
    drawn = torch.tensor([int.from_bytes(os.urandom(7), "big")])
    return int(peers.broadcast(drawn, "naming a checkpoint"))


def _make(folder: Path) -> None:
    """Make the new folder, and room for it: an interrupted save may have left its own."""
    current = current_folder(folder.parent)
    folder.mkdir(parents=True)
    _remove_folders(folder.parent, {folder.name, current})


def _commit(path: Path, manifest: Manifest) -> None:
    manifest.write(path)
    _remove_folders(path, {manifest.folder})


def _remove_folders(path: Path, but: set[str | None]) -> None:
    for folder in folders_in(path):
        if folder.name not in but:
            shutil.rmtree(folder, ignore_errors=True)


# Files ------------------------------------------------------------------------------------


def _write_files(folder: Path, contents: Contents, peers: Peers) -> list[FileRecord]:
    """This worker's part and, on rank 0, what every worker has."""
    if not folder.is_dir():
        raise CheckpointError(
            f"worker {peers.rank} does not see {str(folder)!r}, which worker 0 has made: give the "
            "same folder on every worker, in a file system that all of them share"
        )
    part = folder / part_name(peers.rank, peers.num_workers)
    written = [_write(part, _part(contents))]
    if peers.rank == 0:
        written.append(_write(folder / DENSE, _dense(contents)))
    return written


def _write(path: Path, content: dict[str, Any]) -> FileRecord:
    with path.open("wb") as file:
        counted = _CountedFile(file)
        try:
            torch.save(content, cast(IO[bytes], counted))
        except RuntimeError as error:
            raise counted.error or error from error  # torch does not tell why it cannot write
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(counted.size_bytes, counted.crc32)


class _CountedFile:
    """Keeps the size and the checksum of what is written; torch writes tensors as they lie."""

    def __init__(self, file: IO[bytes]) -> None:
        self.size_bytes = 0
        self.crc32 = 0
        self.error: OSError | None = None
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.size_bytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _all_records(written: list[FileRecord], peers: Peers, where: str) -> dict[str, FileRecord]:
    """Every worker's record of its part, and rank 0's of the dense file."""
    numbers = [number for each in written for number in (each.size_bytes, each.crc32)]
    found = peers.gather(torch.tensor([*numbers, 0, 0][:4]), where)
    files = {DENSE: FileRecord(*found[0][2:].tolist())}
    for rank, each in enumerate(found):
        files[part_name(rank, peers.num_workers)] = FileRecord(*each[:2].tolist())
    return files


# Their content ----------------------------------------------------------------------------


def _row_maps(contents: Contents) -> dict[str, RowMap]:
    found = {name: contents.tables.get(id(p)) for name, p in contents.parameters.items()}
    return {name: table.row_map for name, table in found.items() if table is not None}


def _part(contents: Contents) -> dict[str, Any]:
    sharded = {n: p for n, p in contents.parameters.items() if id(p) in contents.tables}
    tables = {name: contents.tables[id(p)] for name, p in sharded.items()}
    return {
        "rows": {name: table.shard for name, table in tables.items()},
        "state": {name: _state(contents, p, by_row=True) for name, p in sharded.items()},
        "error_feedback": {
            name: table.error_feedback.items()
            for name, table in tables.items()
            if table.error_feedback is not None
        },
        "random": contents.random_then,
    }


def _dense(contents: Contents) -> dict[str, Any]:
    parameters, tables = contents.parameters, contents.tables
    return {
        "parameters": {n: p.detach() for n, p in parameters.items() if id(p) not in tables},
        "buffers": {n: plain(b, f"buffer {n!r}") for n, b in contents.buffers_then.items()},
        "state": {name: _state(contents, p, by_row=False) for name, p in parameters.items()},
        "optimizers": [contents.options(each) for each in contents.optimizers],
        "loaders": [loader.state_dict() for loader in contents.loaders],
        "left": [i for i, loader in enumerate(contents.loaders) if loader.usage.is_left],
        "epoch": contents.epoch,
        "attached": contents.attached.states(),
        "keys": contents.keys,
        "extra": contents.extra,
    }


def _state(contents: Contents, parameter: nn.Parameter, *, by_row: bool) -> dict[str, Any]:
    """What the optimizer keeps of a parameter: what lies by row like its shard, or the rest."""
    table = contents.tables.get(id(parameter))
    shard = None if table is None else table.shard
    return {
        key: plain(value, f"{key!r} in the state of {type(optimizer).__name__}")
        for optimizer in contents.optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
        if (shard is not None and is_by_row(value, shard)) is by_row
    }
