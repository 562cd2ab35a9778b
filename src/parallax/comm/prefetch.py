"""Rows for the batch after this one, of all tables together.

[Note: prefetch] While a step runs, the next batch's ids travel to the owners. Rows that no lookup
of the running step has asked for cannot change in it: they come at once, during compute. The others
come when the step is over, which is when the script asks for the next batch. An owner knows which
are which, because the running step's lookups were prefetched too; it tells by a byte for each row.
So every row travels once, and has the value that a lookup would have found.

A thread answers the others while the script computes; it has groups that nothing else uses, so all
workers send the same messages on them in the same order. It needs no lock: the rows that it sends
are those which the running step leaves alone, and a row stops being one of the others only when
its update is written. On GPUs there is no such thread, and all rows come late.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallax import cost
from parallax.comm.courier import Courier
from parallax.comm.header import NO_FAULT, Layout, Verb, grown
from parallax.comm.peers import Lane, Peers
from parallax.comm.rows import RowExchange, by_group
from parallax.errors import OutOfStepError
from parallax.tables.host import Counts, to_host
from parallax.tables.merge import put_rows
from parallax.tables.space import Keys, SlotSpace, by_owner
from parallax.wire import packed, row_bytes, unpacked

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Arrived:
    """The rows of a batch, and what the workers want from here for it."""

    rows: list[Tensor]
    """By group, in the order of the keys."""
    asked: Tensor
    """Indices of this owner's rows that workers have now."""
    known: Mask
    """By table: whether all workers could tell which rows they want."""


class Prefetch:
    """The rows of one batch on their way."""

    def __init__(
        self,
        peers: Peers,
        space: SlotSpace,
        storages: Sequence[Tensor],
        wanted: Keys,
        is_known: Mask,
        number: int,
    ) -> None:
        """Send the ids. `is_known` says of each table whether this worker can tell which rows it
        wants; `number` counts the batches, the same on all workers."""
        self._peers = peers
        self._space = space
        self._storages = storages
        self._wanted = wanted
        self._number = number
        self._where = f"the rows of batch {number} ahead"
        self._layout = Layout(max_counts=space.num_tables, num_flags=space.num_tables)
        self._early: Future[_Parts] | None = None
        self._seconds = 0.0
        self._by_owner = by_owner(wanted.counts, space.device)
        ids = space.indices(wanted)
        if self._by_owner is not None:
            ids = torch.empty_like(ids).scatter_(0, self._by_owner, ids)
        self.indices = ids.to(torch.int32)
        """Of the rows that this worker wants, by owner."""
        header = self._layout.pack(
            (Verb.LOOKUP, number, space.num_tables, peers.step),
            NO_FAULT,
            wanted.counts.T,
            (~is_known).tolist(),
            to_host(self.indices),
            peers.room_ahead,
        )
        self._header = peers.start_swap(header)

    def send_early(self, courier: Courier, may_change: Callable[[Tensor, Counts], Mask]) -> None:
        """Let the rows that the running step leaves alone come now, in the courier's thread.

        `may_change(indices, counts)` says which of this owner's rows may change in the step.
        """
        self._early = courier.send(lambda: self._bring_early(may_change))

    def send_late(self, spoiled: Mask) -> None:
        """No step runs any more: let the other rows go. Of the tables that are `spoiled`, all rows
        may have changed."""
        start = time.perf_counter()
        with self._peers.waiting(self._where):
            if self._early is None:
                self._parts = _Parts(*self._hear(), None, None)
            else:
                self._parts = self._early.result()
                if spoiled.any():
                    self._parts = self._parts.with_spoiled(spoiled, self._wanted.counts)
            self._exchange = self._sent(late=True)
        self._seconds = time.perf_counter() - start

    def wait(self) -> Arrived:
        start = time.perf_counter()
        with self._peers.waiting(self._where):
            came = self._exchange.wait()
            rows = self._landed(came) if self._parts.comes_late is None else self._buffers
            if self._parts.comes_late is not None:
                self._land(came, late=True)
        self._book(self._seconds + time.perf_counter() - start)
        return Arrived(rows, self._parts.asked, self._parts.known)

    # Ids ----------------------------------------------------------------------------------

    def _hear(self) -> tuple[Counts, Tensor, Mask]:
        """Learn what all workers want: counts by worker and table, indices by worker."""
        peers = self._peers
        messages, work = self._header
        peers.wait(work)
        words = self._layout.words(messages)
        self._check_together(words)
        counts = words[:, 7 : 7 + self._space.num_tables]
        totals, largest = counts.sum(1), int(words[:, 6].max())
        if largest <= peers.room_ahead:
            ids = self._layout.ids(messages, totals).to(self.indices.device)
        else:
            sent = self._wanted.counts.sum(0).tolist()
            ids, work = peers.start_exchange(self.indices, sent, totals.tolist(), Lane.AHEAD)
            peers.wait(work)
        peers.room_ahead = grown(peers.room_ahead, largest)
        return counts, ids.long(), ~np.array(self._layout.flags(messages), np.bool_)

    def _check_together(self, words: Counts) -> None:
        for rank, (number, num_tables) in enumerate(words[:, 1:3].tolist()):
            if (number, num_tables) != (self._number, self._space.num_tables):
                raise OutOfStepError(
                    f"worker {self._peers.rank} is at batch {self._number}, worker {rank} at "
                    f"{number}: every worker must ask its sharded loader for as many batches"
                )

    # Rows ---------------------------------------------------------------------------------

    def _bring_early(self, may_change: Callable[[Tensor, Counts], Mask]) -> _Parts:
        counts, asked, known = self._hear()
        goes_late = may_change(asked, counts)
        mask = torch.from_numpy(goes_late.view(np.uint8))
        received = self._wanted.counts.sum(0).tolist()
        found, work = self._peers.start_exchange(mask, counts.sum(1).tolist(), received, Lane.AHEAD)
        self._peers.wait(work)
        self._parts = _Parts(counts, asked, known, goes_late, found.numpy().view(np.bool_))
        sizes = self._space.group_sums(self._wanted.counts).sum(1).tolist()
        self._buffers = [
            rows.new_empty((size, *rows.shape[1:]))
            for rows, size in zip(self._storages, sizes, strict=True)
        ]
        self._land(self._sent(late=False).wait(), late=False)
        return self._parts

    def _sent(self, *, late: bool) -> RowExchange:
        """Send the rows that others want: those that come late, or the others."""
        parts, space = self._parts, self._space
        counts, asked, received = parts.counts, parts.asked, self._wanted.counts.T
        if parts.goes_late is not None and parts.comes_late is not None:
            goes, comes = parts.goes_late == late, parts.comes_late == late
            asked = asked[torch.from_numpy(np.flatnonzero(goes))]
            counts = _counted(goes, counts)
            received = _counted(comes, received)
        sent = space.group_sums(counts.T)
        self._received = space.group_sums(received.T)
        wire = self._peers.wire
        rows = [
            packed(storage.index_select(0, index - first), wire)
            for storage, index, first in zip(
                self._storages, by_group(asked, sent.T), space.first_indices, strict=True
            )
        ]
        return RowExchange(self._peers, rows, sent, self._received, Lane.AHEAD)

    def _landed(self, came: list[Tensor]) -> list[Tensor]:
        """All rows have come together: put them into the order of the keys."""
        found = []
        for rows, where, like in zip(came, self._sources(), self._storages, strict=True):
            rows = unpacked(rows, like, self._peers.wire)
            found.append(rows if where is None else rows.index_select(0, where))
        return found

    def _sources(self) -> list[Tensor | None]:
        """By group: which of the rows, ordered by owner, belongs to each key."""
        ends = [0, *self._space.group_ends.tolist()]
        return [
            by_owner(self._wanted.counts[first:end], self._space.device)
            for first, end in itertools.pairwise(ends)
        ]

    def _land(self, came: list[Tensor], *, late: bool) -> None:
        """Put some of the rows where they belong."""
        assert self._parts.comes_late is not None
        comes = torch.from_numpy(self._parts.comes_late == late)
        counts = self._space.group_sums(self._wanted.counts).T
        for rows, chosen, where, buffer in zip(
            came, by_group(comes, counts), self._sources(), self._buffers, strict=True
        ):
            places = torch.from_numpy(np.flatnonzero(chosen.numpy()))
            if where is not None:
                places = torch.empty_like(where).scatter_(0, where, torch.arange(len(where)))[
                    places
                ]
            put_rows(buffer, places, unpacked(rows, buffer, self._peers.wire))

    def _book(self, seconds: float) -> None:
        peers, parts, wanted = self._peers, self._parts, self._wanted.counts
        late = wanted.sum(1)
        if parts.comes_late is not None:
            peers.ledger.header_bytes += len(parts.asked)  # The mask, by the thread.
            late = _counted(parts.comes_late, wanted.T).sum(0)
        away = wanted.sum(1) - wanted[:, peers.rank]
        served = parts.counts.sum(0) - parts.counts[peers.rank]
        sizes = np.repeat(
            [row_bytes(rows, peers.wire) for rows in self._storages],
            np.diff(self._space.group_ends, prepend=0),
        )
        peers.ledger.add_rows(
            self._space.names,
            sent_bytes=cost.pull_bytes(away, served, sizes),
            received_bytes=cost.pull_bytes(served, away, sizes),
            asked_rows=wanted.sum(1),
            early_rows=wanted.sum(1) - late,
            seconds=(wanted.sum(1) > 0) * (seconds / max(1, int((wanted.sum(1) > 0).sum()))),
        )


@dataclass(frozen=True)
class _Parts:
    """What workers want from here, and which rows come late."""

    counts: Counts
    """By worker and table."""
    asked: Tensor
    """Indices by worker, and in each by table."""
    known: Mask
    goes_late: Mask | None
    """Of those asked here; None: all."""
    comes_late: Mask | None
    """Of those wanted by this worker, by owner and table; None: all."""

    def with_spoiled(self, spoiled: Mask, wanted: Counts) -> _Parts:
        """Let all rows of spoiled tables come late, again."""
        assert self.goes_late is not None
        assert self.comes_late is not None
        goes = np.repeat(np.tile(spoiled, len(self.counts)), self.counts.ravel())
        comes = np.repeat(np.tile(spoiled, wanted.shape[1]), wanted.T.ravel())
        return _Parts(
            self.counts, self.asked, self.known, self.goes_late | goes, self.comes_late | comes
        )


def _counted(mask: Mask, sizes: Counts) -> Counts:
    """Count what is marked in each of the consecutive parts of these sizes."""
    sums = np.append(0, mask.cumsum())
    edges = np.append(0, sizes.ravel().cumsum())
    found: Counts = np.diff(sums[edges]).reshape(sizes.shape)
    return found
