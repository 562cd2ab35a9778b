"""Rows for the batch after this one, of all tables together.

[Note: lookahead] While a step runs, the next batch's ids travel to the owners. Rows that no lookup
of the running step has asked for cannot change in it: they come at once, during compute. The others
come when the step is over, which is when the script asks for the next batch. An owner knows which
are which, because the running step's lookups were foreseen too; it tells by a byte for each row. So
every row travels once, and has the value that a lookup would have found.

A thread answers the others while the script computes; it has groups that nothing else uses, so all
workers send the same messages on them in the same order. It needs no lock: the rows that it sends
are those which the running step leaves alone, and a row stops being one of the others' only when
its update is written.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from parallax import cost
from parallax.errors import OutOfStepError
from parallax.exchange.collective import Shipment, row_bytes
from parallax.exchange.courier import Courier
from parallax.exchange.header import NO_FAULT, Layout, Verb, grown
from parallax.exchange.peers import Lane, Peers
from parallax.shard import RowMap


class Stock(Protocol):
    """An owner's rows of a table, and which of them the running step may change."""

    name: str
    row_map: RowMap
    shard: Tensor | None
    spoiled: bool
    """Any row may have changed: by a lookup that was not foreseen, or an assignment."""

    def is_hot(self, places: Tensor) -> Tensor:
        """Which of these rows a foreseen lookup since the last update has asked for."""


@dataclass(frozen=True)
class Want:
    """The rows of a table that this worker wants for a batch."""

    stock: Stock
    slots: Tensor
    rows: Tensor
    """The owner's, as they are now: the table may have become whole when they are needed."""
    is_known: bool = True
    """Whether this worker can tell."""


@dataclass
class Demand:
    """The rows of a table that all workers want for a batch."""

    stock: Stock
    slots: Tensor
    counts: list[int]
    """By owner: how many of them it has."""
    asked: list[int]
    """By worker: how many rows it wants from here."""
    places: Tensor
    """Which those are, by worker."""
    rows: Tensor
    """The owner's, as they were when this began."""
    comes_late: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    """By slot: whether it comes when the step is over."""
    goes_late: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    """By place: the same of what is served."""

    @property
    def shard(self) -> Tensor:
        """A table that has become whole meanwhile takes part to the end; nobody uses its rows."""
        shard = self.stock.shard
        return self.rows if shard is None else shard

    def all_late(self) -> None:
        self.comes_late = torch.ones_like(self.slots, dtype=torch.bool)
        self.goes_late = torch.ones_like(self.places, dtype=torch.bool)


class Ahead:
    """The rows of one batch on their way."""

    def __init__(self, peers: Peers, wants: Sequence[Want], number: int) -> None:
        """`number` counts them, the same on all workers."""
        self.demands: list[Demand] = []
        self._peers = peers
        self._wants = wants
        self._number = number
        self._where = f"the rows of batch {number} ahead"
        self._layout = Layout(max_counts=len(wants), num_flags=len(wants))
        self._early: Future[list[Tensor]] | None = None
        self._send_ids()

    def send_early(self, courier: Courier) -> None:
        """Let what a running step leaves alone go now, beside it."""
        self._early = courier.send(self._sent_early)

    def complete(self) -> list[tuple[Demand, Tensor]]:
        """No step runs any more: the rows of all demands."""
        with self._peers.waiting(self._where):
            if self._early is not None:
                early = self._early.result()
            else:
                self._hear()
                early = []
                for demand in self.demands:
                    demand.all_late()
            return self._completed(early)

    def _sent_early(self) -> list[Tensor]:
        self._hear()
        if not self.demands:
            return []
        self._tell_late()
        goes = [~demand.goes_late for demand in self.demands]
        comes = [~demand.comes_late for demand in self.demands]
        return self._swapped_rows(goes, comes)

    def _send_ids(self) -> None:
        slots = [want.slots for want in self._wants]
        maps = [want.stock.row_map for want in self._wants]
        self._counts = [rows.counts(of) for rows, of in zip(maps, slots, strict=True)]
        parts = [
            rows.places(of).split(counts)
            for rows, of, counts in zip(maps, slots, self._counts, strict=True)
        ]
        ids = torch.cat(list(itertools.chain.from_iterable(zip(*parts, strict=True))))
        self._ids = ids.to(torch.int32)
        where = (Verb.LOOKUP, self._number, len(self._wants), self._peers.step)
        header = self._layout.pack(
            where,
            NO_FAULT,
            list(zip(*self._counts, strict=True)),
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
        told = [row[7 : 7 + len(self._wants)] for row in words]
        totals = [sum(row) for row in told]
        largest = max(row[6] for row in words)
        if largest <= self._peers.room_ahead:
            ids = self._layout.ids(messages, totals).to(self._ids.device)
        else:
            sent = [sum(row) for row in zip(*self._counts, strict=True)]
            ids, work = self._peers.start_exchange(self._ids, sent, totals, Lane.AHEAD)
            self._peers.wait(work)
        self._peers.room_ahead = grown(self._peers.room_ahead, largest)
        pieces = ids.long().split([count for row in told for count in row])
        unknown = self._layout.flags(messages)
        for i, want in enumerate(self._wants):
            if not unknown[i]:
                places = torch.cat(pieces[i :: len(self._wants)])
                asked = [row[i] for row in told]
                demand = Demand(want.stock, want.slots, self._counts[i], asked, places, want.rows)
                self.demands.append(demand)

    def _check_together(self, words: list[list[int]]) -> None:
        for rank, row in enumerate(words):
            if row[1:3] != [self._number, len(self._wants)]:
                raise OutOfStepError(
                    f"worker {self._peers.rank} is at batch {self._number}, worker {rank} at "
                    f"{row[1]}: every worker must ask its sharded loader for as many batches"
                )

    def _tell_late(self) -> None:
        for demand in self.demands:
            hot = demand.stock.is_hot(demand.places)
            demand.goes_late = torch.ones_like(hot) if demand.stock.spoiled else hot
        masks = [demand.goes_late.to(torch.uint8) for demand in self.demands]
        asked, counts = ([o.asked for o in self.demands], [o.counts for o in self.demands])
        for demand, mask in zip(self.demands, self._swapped(masks, asked, counts), strict=True):
            demand.comes_late = mask.bool()
        self._peers.ledger.header_bytes += sum(len(mask) for mask in masks)

    def _completed(self, early: list[Tensor]) -> list[tuple[Demand, Tensor]]:
        came = [~demand.comes_late for demand in self.demands]
        for demand in self.demands:
            if demand.stock.spoiled:
                demand.all_late()
        start = time.perf_counter()
        goes = [demand.goes_late for demand in self.demands]
        comes = [demand.comes_late for demand in self.demands]
        late = self._swapped_rows(goes, comes) if self.demands else []
        self._book(time.perf_counter() - start)
        results = []
        for i, demand in enumerate(self.demands):
            rows = late[i]
            if len(rows) < len(demand.slots):
                rows = rows.new_empty((len(demand.slots), *rows.shape[1:]))
                rows[came[i]], rows[comes[i]] = early[i], late[i]
            results.append((demand, rows))
        return results

    # Inside -------------------------------------------------------------------------------

    def _swapped_rows(self, goes: list[Tensor], comes: list[Tensor]) -> list[Tensor]:
        """Send the rows of each demand that `goes` marks; get those that `comes` marks."""
        rows = [
            demand.shard.index_select(0, demand.places[mask])
            for demand, mask in zip(self.demands, goes, strict=True)
        ]
        sent = [_counted(m, o.asked) for m, o in zip(goes, self.demands, strict=True)]
        received = [_counted(m, o.counts) for m, o in zip(comes, self.demands, strict=True)]
        return self._swapped(rows, sent, received)

    def _swapped(
        self, tensors: list[Tensor], sent: list[list[int]], received: list[list[int]]
    ) -> list[Tensor]:
        leaving, coming = (torch.tensor(sizes).t() for sizes in (sent, received))
        shipment = Shipment(self._peers, tensors, leaving, coming, Lane.AHEAD)
        return [torch.cat(pieces) for pieces in shipment.arrived()]

    def _book(self, seconds: float) -> None:
        rank, ledger = self._peers.rank, self._peers.ledger
        for demand in self.demands:
            wanted = sum(demand.counts) - demand.counts[rank]
            served = sum(demand.asked) - demand.asked[rank]
            size_bytes = row_bytes(demand.shard)
            ledger.add(
                demand.stock.name,
                sent_bytes=cost.pull_bytes(wanted, served, size_bytes),
                received_bytes=cost.pull_bytes(served, wanted, size_bytes),
                rows=len(demand.slots),
                seconds=seconds / len(self.demands),
            )


def _counted(mask: Tensor, sizes: Sequence[int]) -> list[int]:
    """How many are marked in each of the consecutive parts of these sizes."""
    sums = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    edges = torch.tensor([0, *itertools.accumulate(sizes)], device=mask.device)
    found: list[int] = sums[edges].diff().tolist()
    return found
