"""The message that begins every operation: who, where, how many rows, and the ids themselves.

[Note: room] An exchange needs to know how much comes from whom, which would cost a message of its
own before the ids. So a header has room for some ids. Every worker tells its largest count, so all
know alike whether the ids were in the headers or follow in a message of their own. The room is the
same for all operations, because gloo ends a process that receives more than it expects: workers
that are in different operations must still be able to read each other's headers. It starts small
and grows to what lookups need. Beyond `MAX_ROOM` a message of its own costs little in comparison.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallax.tables.host import Counts


class Verb(enum.IntEnum):
    """What workers do together."""

    LOOKUP = 1
    LOOKUP_WITHOUT_GRADIENT = 2
    REDUCTION = 3
    GATHER = 4
    MEETING = 5
    OUT_OF_BAND = 6
    PREFETCH = 7


_PHRASES = {
    Verb.LOOKUP: "a lookup of {subject!r} (number {ordinal} of the step)",
    Verb.LOOKUP_WITHOUT_GRADIENT: "a lookup without gradient of {subject!r} (number {ordinal})",
    Verb.REDUCTION: "the end of backward",
    Verb.GATHER: "gathering all rows of {subject!r}",
    Verb.MEETING: "{subject}",
    Verb.OUT_OF_BAND: "a lookup of {subject!r} with other ids than prefetched (number {ordinal})",
    Verb.PREFETCH: "{subject} of batch {ordinal}",
}


class Fault(enum.IntEnum):
    """Why a worker cannot do its part of an operation. It tells the others instead of leaving."""

    NONE = 0
    BAD_ID = 1
    BAD_TYPE = 2


FIRST_ROOM, MAX_ROOM = 64, 8192
NO_FAULT = (Fault.NONE, 0)


@dataclass(frozen=True)
class Operation:
    """An operation in which all workers must be together."""

    verb: Verb
    subject: str
    ordinal: int
    step: int

    def __str__(self) -> str:
        phrase = _PHRASES[self.verb].format(subject=self.subject, ordinal=self.ordinal)
        return f"{phrase} in step {self.step}"


@dataclass(frozen=True)
class Answer:
    """What the workers told each other at the beginning of an operation."""

    counts: Counts
    """By worker and kind: what it has for me."""
    faults: list[tuple[Fault, int]]
    flags: list[bool]
    """Each: whether any worker raised it."""
    ids: Tensor
    """From all workers, in their order; none from those that push as requested."""
    largest: int
    """The most ids that any worker tells any other; the same on all workers."""
    as_requested: NDArray[np.bool_]
    """By worker: whether its ids are those of its last pull, in the same order."""


@dataclass(frozen=True)
class Layout:
    """Where things lie in a header: 64-bit words first, then room for 32-bit ids."""

    max_counts: int
    num_flags: int

    @functools.cached_property
    def num_words(self) -> int:
        return _NUM_HEAD + self.max_counts + -(-self.num_flags // 8)

    def pack(
        self,
        where: Sequence[int],
        fault: tuple[Fault, int],
        counts: Counts,
        flags: Sequence[bool],
        ids: NDArray[np.integer[Any]] | None,
        room: int,
    ) -> Tensor:
        """Return a header for each worker. `counts` is by worker; `ids` are ordered by worker and
        stay out if they do not fit. None: the receivers have them from the last pull."""
        totals = counts.sum(1)
        largest = AS_REQUESTED if ids is None else int(totals.max())
        message = np.zeros((len(counts), 2 * self.num_words + room), np.int32)
        words = message[:, : 2 * self.num_words].view(np.int64)
        words[:, :_NUM_HEAD] = (*where, *fault, largest)
        words[:, _NUM_HEAD : _NUM_HEAD + counts.shape[1]] = counts
        if flags:
            words[:, _NUM_HEAD + self.max_counts :].view(np.uint8)[:, : len(flags)] = flags
        if ids is not None and len(ids) and largest <= room:
            is_taken = np.arange(room) < totals[:, None]
            message[:, 2 * self.num_words :][is_taken] = ids
        return torch.from_numpy(message)

    def words(self, messages: Tensor) -> Counts:
        """Return of each worker: where it is, its fault, its largest count, its counts."""
        return self._head(messages)[:, : _NUM_HEAD + self.max_counts]

    def flags(self, messages: Tensor) -> list[bool]:
        if not self.num_flags:
            return []
        bits = self._head(messages)[:, _NUM_HEAD + self.max_counts :].view(np.uint8)
        found: list[bool] = bits.max(0)[: self.num_flags].astype(np.bool_).tolist()
        return found

    def ids(self, messages: Tensor, totals: Counts) -> Tensor:
        body = messages.numpy()[:, 2 * self.num_words :]
        return torch.from_numpy(body[np.arange(body.shape[1]) < totals[:, None]])

    def _head(self, messages: Tensor) -> Counts:
        found: Counts = messages.numpy()[:, : 2 * self.num_words].view(np.int64)
        return found


_NUM_HEAD = 7
"""Words before the counts: operation (4), fault (2), largest count."""
AS_REQUESTED = -1
"""In the place of the largest count: no ids are told. See [Note: request order] in pull.py."""


def grown(room: int, largest: int) -> int:
    """Return the room of the headers after a lookup. See [Note: room]."""
    if largest > MAX_ROOM:
        return FIRST_ROOM
    if largest <= room:
        return room
    return -(-(largest + largest // 8) // FIRST_ROOM) * FIRST_ROOM  # The next may have a few more.
