"""All workers do a thing, or none goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from parallax.comm.header import Verb
from parallax.comm.peers import Peers
from parallax.errors import CheckpointError

_Result = TypeVar("_Result")
SAVING, LOADING = "saving a checkpoint", "loading a checkpoint"


def meet(peers: Peers, what: str) -> None:
    """See that every worker is here, in the same step, before anything is written or read."""
    peers.announce(peers.operation(Verb.MEETING, what))


def together(peers: Peers, where: str, action: Callable[[], _Result]) -> _Result:
    """Do something on each worker; if one cannot, all raise what it says."""
    result: _Result | None = None
    error: CheckpointError | None = None
    try:
        result = action()
    except CheckpointError as problem:
        error = problem
    except Exception as problem:  # whatever it is, the others must not wait for this worker
        error = CheckpointError(f"{where} failed: {str(problem) or type(problem).__name__}")
        error.__cause__ = problem
    texts = peers.gather_text("" if error is None else str(error), where)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise CheckpointError(f"{text} (found by worker {rank})")
    return cast(_Result, result)
