"""load_newest(): go on from the newest checkpoint that is complete and undamaged."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from parallax.checkpoint.contents import Contents, Restored
from parallax.checkpoint.folder import Folder
from parallax.checkpoint.manifest import has_manifest
from parallax.checkpoint.reader import Reader
from parallax.checkpoint.restorer import opened, restore, verify
from parallax.checkpoint.together import LOADING, meet, together
from parallax.comm.peers import Peers
from parallax.errors import CheckpointError

_log = logging.getLogger("parallax")


def load_newest(folders: Sequence[Folder], contents: Contents, peers: Peers) -> Restored | None:
    """None if there is none yet. Rank 0 looks, every worker reads. Collective.

    Interrupted saves and damaged checkpoints are passed over, with a warning. One that does not
    fit the model is an error, and so is it if all are damaged: a beginning from nothing would
    remove them.
    """
    where = f"looking for a checkpoint in {', '.join(repr(str(f.path)) for f in folders)}"
    meet(peers, LOADING)
    seen = together(peers, where, lambda: _readable(folders) if peers.rank == 0 else [])
    told = json.loads(peers.gather_text(json.dumps(seen), where)[0])
    for index, name in told:
        path = folders[index].path / name
        reader = _shared(path, peers)
        try:
            verify(reader, peers)
        except CheckpointError as error:
            _pass_over(path, error, peers.rank)
            continue
        return restore(reader, contents, peers)
    if told:
        raise CheckpointError(
            f"{where} failed: all that are there are damaged. Remove them to begin from nothing"
        )
    return None


def _readable(folders: Sequence[Folder]) -> list[tuple[int, str]]:
    """Complete ones by what a glance tells: number of the folder and name, the newest first.

    Names, because the folder may have another path on another host.
    """
    found, damaged = [], []
    candidates = [
        (step, index, path)
        for index, folder in enumerate(folders)
        for step, path in folder.candidates()
    ]
    for _, index, path in sorted(candidates, reverse=True):
        if not has_manifest(path):
            _pass_over(path, "its save was interrupted", 0)
            continue
        try:
            Reader(path)
        except CheckpointError as error:
            damaged.append(path)
            _pass_over(path, error, 0)
        else:
            found.append((index, str(path.relative_to(folders[index].path))))
    if damaged and not found:
        raise CheckpointError(
            f"all checkpoints in {str(damaged[0].parent)!r} are damaged. Remove them to begin from "
            "nothing"
        )
    return found


def _shared(path: Path, peers: Peers) -> Reader:
    try:
        return opened(path, peers)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Worker 0 sees it complete: checkpoints must lie on storage that all hosts "
            "share, under the same path"
        ) from error


def _pass_over(path: Path, why: object, rank: int) -> None:
    if rank == 0:
        _log.warning("passing over the checkpoint %r: %s", str(path), why)
