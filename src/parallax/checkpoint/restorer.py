"""load(): every worker takes what it needs, once all have found the checkpoint whole and fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from parallax.checkpoint import generators
from parallax.checkpoint.contents import Contents, Restored
from parallax.checkpoint.plain import owned
from parallax.checkpoint.reader import Reader, Saved
from parallax.checkpoint.together import LOADING, meet, together
from parallax.comm.peers import Peers
from parallax.engine.sparse_table import SparseTable
from parallax.errors import CheckpointError


def load(path: Path, contents: Contents, peers: Peers) -> Restored:
    """Collective. Nothing is changed before every file is verified and every worker agrees."""
    meet(peers, LOADING)
    reader = opened(path, peers)
    verify(reader, peers)
    return restore(reader, contents, peers)


def opened(path: Path, peers: Peers) -> Reader:
    """A checkpoint that every worker sees. Collective."""
    where = _where(path)
    reader = together(peers, where, lambda: Reader(path))
    _check_same(reader, peers, where)
    return reader


def verify(reader: Reader, peers: Peers) -> None:
    """Each worker reads some of the files. Collective."""
    mine = list(reader.manifest.files)[peers.rank :: peers.num_workers]
    together(peers, _where(reader.path), lambda: reader.verify(mine))


def restore(reader: Reader, contents: Contents, peers: Peers) -> Restored:
    """Put a verified checkpoint into the session. Collective."""
    where = _where(reader.path)
    together(peers, where, lambda: _open_fitting(reader, contents))
    together(peers, where, lambda: _restore(reader, contents, peers.rank, peers.num_workers))
    dense = reader.dense
    return Restored(
        path=reader.path,
        step=reader.manifest.step,
        num_workers=reader.manifest.num_workers,
        loaders=owned(dense["loaders"]),
        left=dense.get("left", []),
        epoch=dense.get("epoch", 0),
        attached=owned(dense.get("attached", {})),
        options=[[owned(g["options"]) for g in each["groups"]] for each in dense["optimizers"]],
    )


def _where(path: Path) -> str:
    return f"loading the checkpoint {str(path)!r}"


def _check_same(reader: Reader, peers: Peers, where: str) -> None:
    digests = peers.gather(torch.tensor([reader.manifest.digest]), where)
    if any(int(digest) != int(digests[0]) for digest in digests):
        raise CheckpointError(
            f"{where} failed: the workers see different checkpoints there. Give the same folder on "
            "every worker, and do not save into it meanwhile"
        )


# Checks -----------------------------------------------------------------------------------


def _open_fitting(reader: Reader, contents: Contents) -> None:
    """Names, shapes, dtypes, optimizers and loaders must be those of the session."""
    reader.open()
    parameters, buffers = contents.parameters, contents.buffers
    _check_names("parameters", set(parameters), reader.names)
    _check_names("buffers", set(buffers), set(reader.dense["buffers"]))
    _check_names("extra state", set(contents.extra), set(reader.dense["extra"]))
    for name, parameter in parameters.items():
        saved = reader.parameter(name)
        _check_alike(name, parameter, saved.shape, saved.dtype)
    for name, buffer in buffers.items():
        saved_buffer = reader.dense["buffers"][name]
        _check_alike(name, buffer, saved_buffer.shape, saved_buffer.dtype)
    _check_optimizers(reader, contents)
    for loader, state in zip(contents.loaders, reader.dense["loaders"], strict=False):
        loader.check_fits(state)


def _check_names(kind: str, ours: set[str], theirs: set[str]) -> None:
    if ours != theirs:
        raise CheckpointError(
            f"the checkpoint does not fit the model: only the model has the {kind} "
            f"{sorted(ours - theirs)[:5]}, only the checkpoint {sorted(theirs - ours)[:5]}"
        )


def _check_alike(name: str, ours: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if ours.shape != shape or ours.dtype != dtype:
        raise CheckpointError(
            f"the checkpoint does not fit the model: {name!r} is {tuple(shape)} {dtype} there and "
            f"{tuple(ours.shape)} {ours.dtype} here"
        )


def _check_optimizers(reader: Reader, contents: Contents) -> None:
    ours = [contents.options(each) for each in contents.optimizers]
    theirs = reader.dense["optimizers"]
    kinds_here, kinds_there = ([each["class"] for each in side] for side in (ours, theirs))
    if kinds_here != kinds_there:
        raise CheckpointError(
            f"the checkpoint's optimizers are {', '.join(kinds_there)}, the session's are "
            f"{', '.join(kinds_here)}"
        )
    for here, there in zip(ours, theirs, strict=True):
        if _grouping(here) != _grouping(there):
            raise CheckpointError(
                f"the groups of {here['class']} have other parameters in the checkpoint: "
                f"{_grouping(there)} there, {_grouping(here)} here"
            )


def _grouping(options: dict[str, Any]) -> list[list[str]]:
    return [group["names"] for group in options["groups"]]


# Changes ----------------------------------------------------------------------------------


@torch.no_grad()
def _restore(reader: Reader, contents: Contents, rank: int, num_workers: int) -> None:
    parameters = contents.parameters
    for name, parameter in parameters.items():
        table = contents.tables.get(id(parameter))
        _restore_parameter(reader.parameter(name), parameter, table, rank)
        if table is not None:
            _restore_error_feedback(reader, name, table, rank, num_workers)
    for name, buffer in contents.buffers.items():
        buffer.copy_(reader.dense["buffers"][name])
    for key, value in reader.dense["extra"].items():
        module, _, attribute = key.rpartition(".")
        if attribute == _EXTRA_STATE_KEY_SUFFIX:
            contents.model.get_submodule(module).set_extra_state(owned(value))
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer, options in zip(contents.optimizers, reader.dense["optimizers"], strict=True):
        for group, saved in zip(optimizer.param_groups, options["groups"], strict=True):
            group.update(owned(saved["options"]))
            for parameter in group["params"]:
                state = reader.state(names[id(parameter)])
                table = contents.tables.get(id(parameter))
                _restore_state(optimizer, group, parameter, state, table, rank)
    generators.restore([part["random"] for part in reader.parts], rank)


def _restore_parameter(
    saved: Saved, parameter: nn.Parameter, table: SparseTable | None, rank: int
) -> None:
    if table is None:
        saved.copy_to(parameter.detach())
        return
    assert table.shard is not None
    saved.copy_part_to(table.shard, table.row_map, rank)
    table.replaced()


def _restore_error_feedback(
    reader: Reader, name: str, table: SparseTable, rank: int, num_workers: int
) -> None:
    """Take over the errors that some of the workers had when they saved.

    The mean of the gradients is over another number of workers now, so errors are scaled.
    """
    device, scale = table.parameter.device, num_workers / len(reader.parts)
    table.error_feedback = None
    if not table.rounds:
        return
    for part in reader.parts[rank::num_workers]:
        saved = part.get("error_feedback", {})
        if name not in saved:  # Rows were not compressed.
            continue
        ids, errors = (each.to(device) for each in saved[name])
        if table.error_feedback is None:
            table.error_feedback = table.new_error_feedback()
        table.error_feedback.store(ids, table.error_feedback.lookup(ids) + errors * scale)


def _restore_state(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    state: dict[str, Any],
    table: SparseTable | None,
    rank: int,
) -> None:
    old = optimizer.state.pop(parameter, {})
    if not state:
        return
    target = parameter if table is None else table.shard
    assert target is not None
    # As in torch: counters stay on the CPU unless the step runs on the device alone.
    counts_there = bool(group.get("capturable") or group.get("fused"))
    for key, value in state.items():
        if isinstance(value, Saved):
            fresh = old.pop(key, None)
            if not _fits(fresh, target, value.dtype):
                fresh = None  # So that there is room for another.
                fresh = torch.empty(target.shape, dtype=value.dtype, device=target.device)
            if table is None:
                value.copy_to(fresh)
            else:
                value.copy_part_to(fresh, table.row_map, rank)
        elif isinstance(value, Tensor) and (value.dim() or counts_there):
            fresh = value.to(target.device, copy=True)
        else:
            fresh = owned(value)
        optimizer.state[parameter][key] = fresh


def _fits(old: Any, target: Tensor, dtype: torch.dtype) -> bool:
    """Whether the state can go into the old one: freed memory is not always given back in time."""
    if not isinstance(old, Tensor) or not old.is_contiguous():
        return False
    return (old.shape, old.dtype, old.device) == (target.shape, dtype, target.device)
