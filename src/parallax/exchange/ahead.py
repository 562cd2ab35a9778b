"""Rows for the batch after this one, of all tables together.

[Note: lookahead] While a step runs, the next batch's ids travel to the owners. Rows that no lookup
of the running step has asked for cannot change in it: they come at once, during compute. The others
come when the step is over, which is when the script asks for the next batch. An owner knows which
are which, because the running step's lookups were foreseen too; it tells by a byte for each row. So
every row travels once, and has the value that a lookup would have found.

A thread answers the others while the script computes; it has groups that nothing else uses, so all
workers send the same messages on them in the same order. It needs no lock: the rows that it sends
are those which the running step leaves alone, and a row stops being one of the others' only when
its update is written. On GPUs there is no such thread, and all rows come late.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallax import cost
from parallax.errors import OutOfStepError
from parallax.exchange.courier import Courier
from parallax.exchange.header import NO_FAULT, Layout, Verb, grown
from parallax.exchange.peers import Lane, Peers
from parallax.exchange.shipment import Shipment, families
from parallax.shard import laid_out, put_rows, regrouped
from parallax.tables.rowmap import RowMap
from parallax.wire import packed, row_bytes, unpacked


class Stock(Protocol):
    """An owner's rows of a table, and which of them the running step may change."""

    name: str
    row_map: RowMap
    shard: Tensor | None
    spoiled: bool
    """Any row may have changed: by a lookup that was not foreseen, or an assignment."""

    def is_asked(self, places: Tensor) -> Tensor:
        """Which of these rows a foreseen lookup since the last update has asked for."""


@dataclass(frozen=True)
class Want:
    """The rows of a table that this worker asks for."""

    stock: Stock
    slots: Tensor
    rows: Tensor
    """The owner's, as they are now: the table may have become whole when they are needed."""
    is_known: bool = True
    """Whether this worker can tell which it wants."""

    def no_rows(self) -> Tensor:
        """In the place of rows that nobody asked for after all."""
        return self.rows.new_zeros((len(self.slots), *self.rows.shape[1:]))


@dataclass(frozen=True)
class Demand:
    """The rows of a table that workers want for a batch."""

    stock: Stock
    slots: Tensor
    """Those that this worker asks for."""
    places: Tensor
    """Those that workers want from here."""
    rows: Tensor
    """The owner's, as they were when this began."""

    @property
    def shard(self) -> Tensor:
        """A table that has become whole meanwhile takes part to the end; nobody uses its rows."""
        shard = self.stock.shard
        return self.rows if shard is None else shard


@dataclass(frozen=True)
class Part:
    """Some of the rows, which go together: those that come early, or the others."""

    sent: Tensor
    """By table and worker: how many go there."""
    received: Tensor
    """By table and owner: how many come from there."""
    places: Tensor
    """Which rows go: by table, and in each by worker."""
    destinations: Tensor
    """Where those that come belong among all, by table. They come by owner and in each by table."""


class Ahead:
    """The rows of one batch on their way."""

    def __init__(self, peers: Peers, wants: Sequence[Want], number: int) -> None:
        """`number` counts them, the same on all workers."""
        self._peers = peers
        # Families lie beside each other, so that the rows of each are a part of all.
        self._wants = [wants[i] for i in itertools.chain(*families([w.rows for w in wants]))]
        self._number = number
        self._where = f"the rows of batch {number} ahead"
        self._layout = Layout(max_counts=len(wants), num_flags=len(wants))
        self._early: Future[None] | None = None
        self._demands: list[Demand] = []
        self._buffers: list[Tensor] = []
        self._shipment: Shipment | None = None
        self._mask_bytes = 0
        self._send_ids()

    def send_early(self, courier: Courier) -> None:
        """Let what a running step leaves alone go now, beside it."""
        self._early = courier.send(self._bring_early)

    def send_late(self) -> None:
        """No step runs any more: let the other rows go."""
        start = time.perf_counter()
        with self._peers.waiting(self._where):
            if self._early is not None:
                self._early.result()
            else:
                self._hear()
                self._late = self._all
            if not self._demands:
                return
            if any(demand.stock.spoiled for demand in self._demands):
                self._late = self._with_spoiled()
            self._shipment = self._sent(self._late)
        self._seconds = time.perf_counter() - start

    def arrived(self) -> list[tuple[Demand, Tensor]]:
        """The rows of all demands."""
        if self._shipment is None:
            return []
        start = time.perf_counter()
        with self._peers.waiting(self._where):
            self._land(self._late, self._shipment)
        self._book(self._seconds + time.perf_counter() - start)
        sizes = [len(demand.slots) for demand in self._demands]
        rows = itertools.chain.from_iterable(
            buffer.split_with_sizes([sizes[i] for i in members])
            for buffer, members in zip(self._buffers, self._families, strict=True)
        )
        return list(zip(self._demands, rows, strict=True))

    # Ids ----------------------------------------------------------------------------------

    def _send_ids(self) -> None:
        self._counts, places = laid_out(
            [want.stock.row_map for want in self._wants], [want.slots for want in self._wants]
        )
        order = regrouped(self._counts.t()).to(places.device)
        self._ids = places.to(torch.int32)[order]
        where = (Verb.LOOKUP, self._number, len(self._wants), self._peers.step)
        header = self._layout.pack(
            where,
            NO_FAULT,
            self._counts.t().tolist(),
            [not want.is_known for want in self._wants],
            self._ids.cpu(),
            self._peers.room_ahead,
        )
        self._header = self._peers.start_swap(header)

    def _hear(self) -> None:
        """See what all workers want; a table that one of them cannot tell of is left out."""
        messages, work = self._header
        self._peers.wait(work)
        words = self._layout.words(messages)
        self._check_together(words)
        told = torch.tensor([row[7 : 7 + len(self._wants)] for row in words])
        totals = told.sum(1).tolist()
        largest = max(row[6] for row in words)
        if largest <= self._peers.room_ahead:
            ids = self._layout.ids(messages, totals).to(self._ids.device)
        else:
            sent = self._counts.sum(0).tolist()
            ids, work = self._peers.start_exchange(self._ids, sent, totals, Lane.AHEAD)
            self._peers.wait(work)
        self._peers.room_ahead = grown(self._peers.room_ahead, largest)
        places = ids.long()[regrouped(told.t()).to(ids.device)]
        self._note(told.t(), places, self._layout.flags(messages))

    def _check_together(self, words: list[list[int]]) -> None:
        for rank, row in enumerate(words):
            if row[1:3] != [self._number, len(self._wants)]:
                raise OutOfStepError(
                    f"worker {self._peers.rank} is at batch {self._number}, worker {rank} at "
                    f"{row[1]}: every worker must ask its sharded loader for as many batches"
                )

    def _note(self, asked: Tensor, places: Tensor, unknown: list[bool]) -> None:
        """Keep what is wanted of the tables that all workers can tell of."""
        pieces = places.split_with_sizes(asked.sum(1).tolist())
        known = [i for i, is_unknown in enumerate(unknown) if not is_unknown]
        self._demands = [
            Demand(want.stock, want.slots, pieces[i], want.rows)
            for i, want in enumerate(self._wants)
            if i in known
        ]
        if len(known) < len(unknown):
            nothing = places[:0]
            places = torch.cat([nothing, *(pieces[i] for i in known)])
        wanted = self._counts[known]
        destinations = regrouped(wanted.t()).to(places.device)
        self._all = Part(asked[known], wanted, places, destinations)
        self._families = families([demand.rows for demand in self._demands])
        for members in self._families:
            like, size = self._demands[members[0]].rows, int(wanted[members].sum())
            self._buffers.append(like.new_empty((size, *like.shape[1:])))

    # Rows ---------------------------------------------------------------------------------

    def _bring_early(self) -> None:
        self._hear()
        if not self._demands:
            return
        late = [
            torch.ones_like(d.places, dtype=torch.bool)
            if d.stock.spoiled
            else d.stock.is_asked(d.places)
            for d in self._demands
        ]
        self._goes_late = torch.cat(late)
        self._comes_late = self._told_late()
        early = self._part(~self._goes_late, ~self._comes_late)
        self._late = self._part(self._goes_late, self._comes_late)
        self._land(early, self._sent(early))

    def _told_late(self) -> Tensor:
        """Tell the others which of their rows come late; by owner and table, which of mine do."""
        order = regrouped(self._all.sent.t()).to(self._goes_late.device)
        mask = self._goes_late[order].to(torch.uint8)
        sent, received = self._all.sent.sum(0).tolist(), self._all.received.sum(0).tolist()
        found, work = self._peers.start_exchange(mask, sent, received, Lane.AHEAD)
        self._peers.wait(work)
        self._mask_bytes = len(mask)
        return found.bool()

    def _with_spoiled(self) -> Part:
        """What comes late if all rows of spoiled tables do."""
        if self._late is self._all:
            return self._all
        spoiled = torch.tensor([demand.stock.spoiled for demand in self._demands])
        goes = torch.repeat_interleave(spoiled, self._all.sent.sum(1))
        wanted = self._all.received
        comes = torch.repeat_interleave(spoiled.repeat(wanted.shape[1]), wanted.t().flatten())
        device = self._goes_late.device
        return self._part(self._goes_late | goes.to(device), self._comes_late | comes.to(device))

    def _part(self, goes: Tensor, comes: Tensor) -> Part:
        """What `goes` marks of what is asked, and `comes` of what is wanted."""
        whole = self._all
        return Part(
            _counted(goes, whole.sent),
            _counted(comes, whole.received.t()).t(),
            whole.places[goes],
            whole.destinations[comes],
        )

    def _sent(self, part: Part) -> Shipment:
        places = part.places.split_with_sizes(part.sent.sum(1).tolist())
        rows = [
            packed(demand.shard.index_select(0, where), self._peers.wire)
            for demand, where in zip(self._demands, places, strict=True)
        ]
        return Shipment(self._peers, rows, part.sent, part.received, Lane.AHEAD, self._families)

    def _land(self, part: Part, shipment: Shipment) -> None:
        """Put the rows that come where they belong."""
        first = 0
        for buffer, family in zip(self._buffers, shipment.arrived(), strict=True):
            places = part.destinations - first
            if len(self._buffers) > 1:
                places = places[(places >= 0) & (places < len(buffer))]
            put_rows(buffer, places, unpacked(family.rows, buffer, self._peers.wire))
            first += len(buffer)

    def _book(self, seconds: float) -> None:
        rank, ledger, whole = self._peers.rank, self._peers.ledger, self._all
        wanted, served = (
            (counts.sum(1) - counts[:, rank]).tolist() for counts in (whole.received, whole.sent)
        )
        ledger.header_bytes += self._mask_bytes  # Not by the thread that sent them.
        late, sizes = self._late.received.sum(1).tolist(), whole.received.sum(1).tolist()
        for i, demand in enumerate(self._demands):
            size_bytes = row_bytes(demand.rows, self._peers.wire)
            ledger.add(
                demand.stock.name,
                sent_bytes=cost.pull_bytes(wanted[i], served[i], size_bytes),
                received_bytes=cost.pull_bytes(served[i], wanted[i], size_bytes),
                asked_rows=sizes[i],
                early_rows=sizes[i] - late[i],
                seconds=seconds / len(self._demands),
            )


def _counted(mask: Tensor, sizes: Tensor) -> Tensor:
    """How many are marked in each of the consecutive parts of these sizes."""
    sums = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    edges = torch.cat([sizes.new_zeros(1), sizes.flatten().cumsum(0)])
    return sums[edges.to(mask.device)].diff().cpu().reshape(sizes.shape)
