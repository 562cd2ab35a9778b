"""The message that begins every operation: who, where, how many rows, and the ids themselves.

[Note: room] An exchange needs to know how much comes from whom, which would cost a message of its
own before the ids. So a header has room for some ids. Every worker tells its largest count, so all
know alike whether the ids were in the headers or follow in a message of their own. The room is the
same for all operations, because gloo ends a process that receives more than it expects: workers
that are in different operations must still be able to read each other's headers. It starts small
and doubles to what lookups need; beyond `MAX_ROOM` a message of its own costs little in comparison.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Verb(enum.IntEnum):
    """What workers do together."""

    LOOKUP = 1
    LOOKUP_WITHOUT_GRADIENT = 2
    REDUCTION = 3
    GATHER = 4
    MEETING = 5
    DETOUR = 6
    AHEAD = 7


_PHRASES = {
    Verb.LOOKUP: "a lookup of {subject!r} (number {ordinal} of the step)",
    Verb.LOOKUP_WITHOUT_GRADIENT: "a lookup without gradient of {subject!r} (number {ordinal})",
    Verb.REDUCTION: "the end of backward",
    Verb.GATHER: "gathering all rows of {subject!r}",
    Verb.MEETING: "{subject}",
    Verb.DETOUR: "a lookup of {subject!r} with other ids than foreseen (number {ordinal})",
    Verb.AHEAD: "{subject} of batch {ordinal}",
}


class Fault(enum.IntEnum):
    """Why a worker cannot do its part of an operation. It tells the others instead of leaving."""

    NONE = 0
    BAD_ID = 1
    BAD_TYPE = 2


FIRST_ROOM, MAX_ROOM = 64, 1024
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

    counts: list[list[int]]
    """By worker: what it has for me."""
    faults: list[tuple[Fault, int]]
    flags: list[bool]
    """Each: whether any worker raised it."""
    ids: Tensor
    """From all workers, in their order."""
    largest: int
    """The most that any worker has for any; the same on all workers."""


@dataclass(frozen=True)
class Layout:
    """Where things lie in a header: 64-bit words first, then room for 32-bit ids."""

    max_counts: int
    num_flags: int

    @property
    def num_words(self) -> int:
        return 7 + self.max_counts + -(-self.num_flags // 8)

    def pack(
        self,
        where: Sequence[int],
        fault: tuple[Fault, int],
        counts: Sequence[Sequence[int]],
        flags: Sequence[bool],
        ids: Tensor,
        room: int,
    ) -> Tensor:
        """A header for each worker; `ids` are sorted by worker and stay out if they do not fit."""
        totals = [sum(row) for row in counts]
        head = [*where, *fault, max(totals)]
        padding = [0] * (self.max_counts - len(counts[0]))
        words = torch.tensor([[*head, *row, *padding] for row in counts], dtype=torch.int64)
        bits = torch.zeros(-(-self.num_flags // 8) * 8, dtype=torch.uint8)
        if flags:
            bits[: len(flags)] = torch.tensor(flags, dtype=torch.uint8)
        everyones = bits.view(torch.int64).expand(len(counts), -1)
        body = torch.zeros((len(counts), room), dtype=torch.int32)
        if len(ids) and max(totals) <= room:
            sizes = torch.tensor(totals)
            workers = torch.repeat_interleave(torch.arange(len(counts)), sizes)
            starts = sizes.cumsum(0) - sizes
            body[workers, torch.arange(len(ids)) - starts[workers]] = ids
        return torch.cat([torch.cat([words, everyones], 1).view(torch.int32), body], 1)

    def words(self, messages: Tensor) -> list[list[int]]:
        found: list[list[int]] = self._head(messages)[:, : 7 + self.max_counts].tolist()
        return found

    def flags(self, messages: Tensor) -> list[bool]:
        if not self.num_flags:
            return []
        bits = self._head(messages)[:, 7 + self.max_counts :].contiguous().view(torch.uint8)
        return [bool(bit) for bit in bits.amax(0)[: self.num_flags].tolist()]

    def ids(self, messages: Tensor, totals: Sequence[int]) -> Tensor:
        body = messages[:, 2 * self.num_words :]
        return torch.cat([row[:total] for row, total in zip(body, totals, strict=True)])

    def _head(self, messages: Tensor) -> Tensor:
        return messages[:, : 2 * self.num_words].contiguous().view(torch.int64)


def grown(room: int, largest: int) -> int:
    """The room of the headers after a lookup. See [Note: room]."""
    if largest <= MAX_ROOM:
        while room < largest:
            room *= 2
    return room
