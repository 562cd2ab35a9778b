"""Pull the rows of a batch: ids go to the owners of all tables, rows come back.

[Note: early and late] While a step runs, the ids of the next batch travel to the owners. Rows that
no lookup of the running step has asked for cannot change in it. They come at once (*early*), during
compute. The others come *late*: when the step is over, which is when the script asks for the next
batch. The owner knows which are which, because the running step's rows were pulled too, and tells
it by a byte for each row. So each row travels once, with the value that a lookup would have found.

A thread serves the others while the script computes. It has process groups that nothing else uses,
so all workers send the same messages on them in the same order. It needs no lock: it sends only
rows that the running step leaves alone. On GPUs there is no such thread, and all rows come late.

[Note: request order] Messages list rows by owner, and for each owner in the order of keys (see
[Note: keys] in tables/space.py). Gradients of the same rows are pushed in this order, so a push
needs no ids: the owner has them from the pull.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallax.comm.compression import RowFormat, packed, row_bytes, unpacked
from parallax.comm.header import NO_FAULT, Layout, Verb, grown
from parallax.comm.peers import Lane, Peers
from parallax.comm.push import Incoming
from parallax.comm.rows import RowExchange, by_group
from parallax.comm.threads import BackgroundThread
from parallax.errors import OutOfStepError
from parallax.planning import cost
from parallax.tables.host import Counts, to_host
from parallax.tables.space import Keys, SlotSpace, by_owner

Mask = NDArray[np.bool_]

EARLY_BYTES = 1 << 18
"""Fewer bytes of rows all come late: the two messages of early rows would cost more than they save.
Measured with the benchmark workloads `small` (0.1 MB) and `dlrm` (1.6 MB)."""


class RunningStep(Protocol):
    """What the step that runs now may change."""

    def may_change(self, indices: Tensor, counts: Counts) -> Mask:
        """Say of each of this owner's rows whether the running step may change it; `counts` is by
        worker and table."""


@dataclass(frozen=True)
class Asked:
    """The rows of this owner that the workers asked for."""

    counts: Counts
    """By worker and table."""
    indices: Tensor
    """By worker, in request order."""
    known: Mask
    """By table: whether all workers could tell which rows they want."""
    incoming: Incoming
    """Their gradients, if all workers push them in request order."""
    largest: int
    """The most rows that any worker asks another for; the same on all workers."""


@dataclass(frozen=True)
class Pulled:
    """The rows of a batch, in the order in which they came."""

    rows: list[Tensor]
    """By group."""
    places: list[Tensor | None]
    """By group: where the row of each key is among `rows`; None: in the order of keys."""
    asked: Asked

    def by_key(self) -> list[Tensor]:
        """Return the rows in the order of keys."""
        return [
            rows if places is None else rows.index_select(0, places)
            for rows, places in zip(self.rows, self.places, strict=True)
        ]


class Pull:
    """The rows of one batch on their way."""

    def __init__(
        self,
        peers: Peers,
        space: SlotSpace,
        storages: Sequence[Tensor],
        wanted: Keys,
        is_known: Mask,
        number: int,
        num_parts: int,
    ) -> None:
        """Send the ids. `is_known` says of each table whether this worker can tell which rows it
        wants; `number` counts the batches, the same on all workers. The gradients of these rows
        are expected in `num_parts` parts."""
        self._peers = peers
        self._space = space
        self._storages = storages
        self._wanted = wanted
        self._number = number
        self._num_parts = num_parts
        self._where = f"the prefetch of batch {number}"
        self._layout = Layout(max_counts=space.num_tables, num_flags=space.num_tables)
        self._early: Future[_Early] | None = None
        self._seconds = 0.0
        ids = space.indices(wanted)
        self.orders = request_orders(space, wanted.counts)
        """By group: the position of each key in request order; None: the order of keys."""
        several = space.num_groups > 1
        order = by_owner(wanted.counts, space.device) if several else self.orders[0]
        if order is not None:
            ids = torch.empty_like(ids).scatter_(0, order, ids)
        self.indices = ids.to(torch.int32)
        """Of the rows that this worker wants, in request order."""
        header = self._layout.pack(
            (Verb.LOOKUP, number, space.num_tables, peers.step),
            NO_FAULT,
            wanted.counts.T,
            (~is_known).tolist(),
            to_host(self.indices),
            peers.prefetch_room,
        )
        self._header = peers.start_swap(header)

    def send_early(self, thread: BackgroundThread, running: RunningStep) -> None:
        """Let the rows that the running step leaves alone come now, in a thread."""
        self._early = thread.submit(lambda: self._bring_early(running))

    def send_late(self, changed: Mask) -> None:
        """No step runs any more: let the other rows go. All rows of the tables in `changed` may
        have other values by now."""
        start = time.perf_counter()
        with self._peers.waiting(self._where):
            if self._early is None:
                self._asked = self._hear()
                self._late = _Late(self._wanted.counts.T, None)
                self._exchange = self._start(self._asked.counts, self._asked.indices, None)
            else:
                early = self._early.result()
                self._asked = early.asked
                if changed.any():
                    early = early.with_changed(changed, self._wanted.counts)
                goes = torch.from_numpy(np.flatnonzero(early.goes_late))
                counts = _counted(early.goes_late, self._asked.counts)
                comes = _counted(early.comes_late, self._wanted.counts.T)
                self._late = _Late(comes, early)
                self._exchange = self._start(counts, self._asked.indices[goes], comes)
        self._seconds = time.perf_counter() - start

    def wait(self) -> Pulled:
        """Return all rows, when the late ones have come."""
        start = time.perf_counter()
        with self._peers.waiting(self._where):
            came = self._exchange.wait()
        rows = self._unpacked(came)
        places: list[Tensor | None] = list(self.orders)
        if self._late.early is not None:
            rows, places = self._joined(self._late.early, rows)
        self._book(self._seconds + time.perf_counter() - start)
        return Pulled(rows, places, self._asked)

    def is_large(self) -> bool:
        """Whether a batch of this size is worth early rows; the same on all workers."""
        row = max(row_bytes(rows, self._peers.row_format) for rows in self._storages)
        return self._asked.largest * self._peers.num_workers * row >= EARLY_BYTES

    # Ids ----------------------------------------------------------------------------------

    def _hear(self) -> Asked:
        """Learn which rows all workers want from here."""
        peers = self._peers
        messages, work = self._header
        peers.wait(work)
        words = self._layout.words(messages)
        self._check_together(words)
        counts = words[:, 7 : 7 + self._space.num_tables]
        totals, largest = counts.sum(1), int(words[:, 6].max())
        if largest <= peers.prefetch_room:
            ids = self._layout.ids(messages, totals).to(self.indices.device)
        else:
            sent = self._wanted.counts.sum(0).tolist()
            ids, work = peers.start_exchange(self.indices, sent, totals.tolist(), Lane.PREFETCH)
            peers.wait(work)
        peers.prefetch_room = grown(peers.prefetch_room, largest)
        known = ~np.array(self._layout.flags(messages), np.bool_)
        ids = ids.long()
        received = self._space.group_sums(counts.T)
        incoming = Incoming(by_group(ids, received.T), received, self._num_parts)
        return Asked(counts, ids, known, incoming, largest)

    def _check_together(self, words: Counts) -> None:
        for rank, (number, num_tables) in enumerate(words[:, 1:3].tolist()):
            if (number, num_tables) != (self._number, self._space.num_tables):
                raise OutOfStepError(
                    f"worker {self._peers.rank} is at batch {self._number}, worker {rank} at "
                    f"{number}: every worker must ask its sharded loader for as many batches"
                )

    # Rows ---------------------------------------------------------------------------------

    def _bring_early(self, running: RunningStep) -> _Early:
        asked, peers = self._hear(), self._peers
        goes_late = running.may_change(asked.indices, asked.counts)
        mask = torch.from_numpy(goes_late.view(np.uint8))
        sizes = self._wanted.counts.sum(0).tolist()
        found, work = peers.start_exchange(mask, asked.counts.sum(1).tolist(), sizes, Lane.PREFETCH)
        peers.wait(work)
        comes_late: Mask = found.numpy().view(np.bool_)
        counts = asked.counts - _counted(goes_late, asked.counts)
        comes = self._wanted.counts.T - _counted(comes_late, self._wanted.counts.T)
        goes = torch.from_numpy(np.flatnonzero(~goes_late))
        exchange = self._start(counts, asked.indices[goes], comes)
        asked.incoming.merges()  # Overlaps with the rows.
        rows = self._unpacked(exchange.wait())
        return _Early(asked, goes_late, comes_late, comes_late, rows)

    def _start(self, counts: Counts, indices: Tensor, comes: Counts | None) -> RowExchange:
        """Send some of the rows that others want: `counts` by worker and table. `comes` are those
        that come here, by owner and table; None: all that were asked for."""
        space, row_format = self._space, self._peers.row_format
        sent = space.group_sums(counts.T)
        received = space.group_sums(self._wanted.counts if comes is None else comes.T)
        rows = [
            packed(storage.index_select(0, index - first if first else index), row_format)
            for storage, index, first in zip(
                self._storages, by_group(indices, sent.T), space.first_indices, strict=True
            )
        ]
        return RowExchange(self._peers, rows, sent, received, Lane.PREFETCH)

    def _unpacked(self, came: list[Tensor]) -> list[Tensor]:
        row_format = self._peers.row_format
        if row_format is RowFormat.FLOAT32:
            return came
        return [
            unpacked(rows, like, row_format)
            for rows, like in zip(came, self._storages, strict=True)
        ]

    def _joined(
        self, early: _Early, late: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return early and late rows of each group behind each other, and the place of each key's
        row. If a table changed since its early rows came, they are there twice, the late ones
        count."""
        masks = early.comes_late, early.came_late
        sizes = self._space.group_sums(self._wanted.counts).T
        late_now, late_then = (by_group(torch.from_numpy(mask), sizes) for mask in masks)
        rows: list[Tensor] = []
        places: list[Tensor | None] = []
        for group, order in enumerate(self.orders):
            rows.append(torch.cat([early.rows[group], late[group]]))
            is_late, was_late = late_now[group].numpy(), late_then[group].numpy()
            at = np.where(
                is_late, len(early.rows[group]) + is_late.cumsum() - 1, (~was_late).cumsum() - 1
            )
            place = torch.from_numpy(at)
            places.append(place if order is None else place[order])
        return rows, places

    def _book(self, seconds: float) -> None:
        peers, wanted = self._peers, self._wanted.counts
        total = wanted.sum(1)
        if self._late.early is not None:
            peers.ledger.header_bytes += len(self._asked.indices)  # The mask, by the thread.
        away = total - wanted[:, peers.rank]
        counts = self._asked.counts
        served = counts.sum(0) - counts[peers.rank]
        sizes = self._space.by_table([row_bytes(rows, peers.row_format) for rows in self._storages])
        is_used = total > 0
        peers.ledger.add_rows(
            self._space.names,
            sent_bytes=cost.pull_bytes(away, served, sizes),
            received_bytes=cost.pull_bytes(served, away, sizes),
            asked_rows=total,
            early_rows=total - self._late.counts.sum(0),
            seconds=is_used * (seconds / max(1, int(is_used.sum()))),
        )


@dataclass(frozen=True)
class _Early:
    """What workers want from here, which rows come late, and those that came early."""

    asked: Asked
    goes_late: Mask
    """Of those asked here, in request order."""
    comes_late: Mask
    """Of those wanted by this worker."""
    came_late: Mask
    """The same when the early rows came."""
    rows: list[Tensor]
    """Early rows by group."""

    def with_changed(self, changed: Mask, wanted: Counts) -> _Early:
        """Let all rows of the tables that have changed come late, again."""
        counts = self.asked.counts
        goes = np.repeat(np.tile(changed, len(counts)), counts.ravel())
        comes = np.repeat(np.tile(changed, wanted.shape[1]), wanted.T.ravel())
        return _Early(
            self.asked, self.goes_late | goes, self.comes_late | comes, self.came_late, self.rows
        )


@dataclass(frozen=True)
class _Late:
    """The rows that come late."""

    counts: Counts
    """By owner and table."""
    early: _Early | None
    """None: all rows come late."""


def request_orders(space: SlotSpace, counts: Counts) -> list[Tensor | None]:
    """Return, by group, where each key is in request order; None: keys are in that order."""
    ends = [0, *space.group_ends.tolist()]
    return [by_owner(counts[first:end], space.device) for first, end in itertools.pairwise(ends)]


def _counted(mask: Mask, sizes: Counts) -> Counts:
    """Count what is marked in each of the consecutive parts of these sizes."""
    sums = np.append(0, mask.cumsum())
    edges = np.append(0, sizes.ravel().cumsum())
    found: Counts = np.diff(sums[edges]).reshape(sizes.shape)
    return found
