"""Synchronous exchange: rows and row gradients go between all workers at once.

A lookup is a header with the ids, and an exchange of rows. A push of all tables is a header with
their ids, and an exchange of gradients for each dtype and part. Rows that a worker owns itself do
not travel.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax import cost
from parallax.exchange.header import Fault, Operation
from parallax.exchange.peers import Peers
from parallax.exchange.shipment import Shipment, families
from parallax.shard import Merge, laid_out, put_rows, regrouped, spread
from parallax.tables.rowmap import RowMap
from parallax.wire import Wire, packed, row_bytes, unpacked

Waiting = AbstractContextManager[None]


@dataclass(frozen=True)
class Parcel:
    """The gradients of some rows of a table: the sender's slots, or the owner's places."""

    name: str
    row_map: RowMap
    slots: Tensor
    values: Tensor
    packed: Tensor | None = None
    """The values as they travel, if they are rounded for it."""


def pull(
    peers: Peers,
    operation: Operation,
    row_map: RowMap,
    shard: Tensor,
    slots: Tensor,
    fault: tuple[Fault, int],
) -> tuple[Tensor, list[tuple[Fault, int]]]:
    """The rows at some sorted slots, and the workers' faults (then there are no rows)."""
    by_owner, places = laid_out([row_map], [slots])
    counts: list[int] = by_owner[0].tolist()
    told = peers.announce(
        operation, [[count] for count in counts], ids=places, fault=fault, is_met=True
    )
    if any(code for code, _ in told.faults):
        return shard[:0], told.faults
    served = shard.index_select(0, told.ids)
    if peers.num_workers == 1 or told.largest == 0:  # nobody needs a row that it has not yet
        return served, told.faults
    asked = [count for (count,) in told.counts]
    with peers.ledger.timed(operation.subject), peers.waiting(operation):
        came = peers.exchange(packed(served, peers.wire), asked, counts)
    rows = unpacked(came, shard, peers.wire)
    _book_pull(peers, operation.subject, row_bytes(shard, peers.wire), counts, asked)
    return rows, told.faults


@dataclass(frozen=True)
class Push:
    """A push under way: all workers know whose rows go where, and wait for the gradients."""

    parcels: list[Parcel]
    sent: Tensor
    """By parcel and worker: rows that go there."""
    received: Tensor
    """By parcel and worker: rows that come from there."""
    going: Tensor
    """Their places there: of what goes, by worker and in each by parcel."""
    coming: Tensor
    """Their places here: of what comes, likewise."""


def announce_push(
    peers: Peers, operation: Operation, parcels: list[Parcel], flags: Sequence[bool]
) -> tuple[Push, list[bool]]:
    """Tell the owners which rows have gradients; also raise flags, and hear those of all.

    Every worker gives the same tables in the same order, with the rows that it has itself.
    """
    counts = torch.empty((0, peers.num_workers), dtype=torch.int64)
    ids = torch.empty(0, dtype=torch.int64)
    if parcels:
        counts, places = laid_out([p.row_map for p in parcels], [p.slots for p in parcels])
        ids = places[regrouped(counts.t()).to(places.device)]
    told = peers.announce(operation, counts.t().tolist(), ids=ids, flags=flags, is_met=True)
    received = torch.tensor(told.counts, dtype=torch.int64).t()
    return Push(parcels, counts, received, ids, told.ids.long()), told.flags


def complete_push(
    peers: Peers, operation: Operation, push: Push, chosen: Sequence[int], num_partitions: int = 1
) -> list[Parcel]:
    """Bring the gradients of the chosen tables' rows to their owners; average over workers."""
    parcels = [push.parcels[i] for i in chosen]
    if peers.num_workers == 1 or not parcels:
        return parcels
    with peers.waiting(operation):
        bring = Bring(peers, push, chosen, num_partitions)
    found = bring.summed(1 / peers.num_workers, lambda: peers.waiting(operation))
    updated = [parcel.slots.size(0) for parcel in found]
    _book_push(peers, push, chosen, bring.waited_seconds, updated)
    return found


class Bring:
    """Gradients on their way to where they are summed.

    [Note: parts] They go in several parts, so that one is summed while the next ones travel. A row
    belongs to the part `place % number` of its place in the bundle, which its senders and its owner
    know alike and which spreads the rows that are touched most.
    """

    def __init__(
        self, peers: Peers, push: Push, chosen: Sequence[int], num_partitions: int = 1
    ) -> None:
        """Send those of the chosen tables."""
        self.waited_seconds = 0.0
        self._num_tables = len(chosen)
        self._groups = families([push.parcels[i].values for i in chosen])
        bundles = [_Bundle(push, [chosen[i] for i in members]) for members in self._groups]
        cut = [bundle.cut(num_partitions) for bundle in bundles]
        self._shipments = [_shipped(peers, parts) for parts in zip(*cut, strict=True)]
        self._sums = [
            _Sum(bundle, parts, peers.wire) for bundle, parts in zip(bundles, cut, strict=True)
        ]

    def summed(self, scale: float, waiting: Callable[[], Waiting]) -> list[Parcel]:
        """By row, times `scale`; `waiting` says what a wait belongs to."""
        for number, shipment in enumerate(self._shipments):
            start = time.perf_counter()
            with waiting():
                arrived = shipment.arrived()
            self.waited_seconds += time.perf_counter() - start
            for family, total in zip(arrived, self._sums, strict=True):
                total.add(number, family.rows, scale)
        found: dict[int, Parcel] = {}
        for members, total in zip(self._groups, self._sums, strict=True):
            found |= zip(members, total.by_table(), strict=True)
        return [found[i] for i in range(self._num_tables)]


@dataclass(frozen=True)
class _Part:
    """Of a bundle: what travels together."""

    values: list[Tensor]
    """Each by worker: one of all tables, or one of each table."""
    sent: Tensor
    """For each of them, and by worker: how many go there."""
    received: Tensor
    """… and how many come from there."""
    coming: Tensor | None = None
    """The places of what comes, by worker; None if it is the whole, and not worked out yet."""


class _Bundle:
    """The gradients of tables alike as if they were one table's: its places are those of the first
    table, then those of the second one, and so on. See [Note: families] in shipment.py."""

    def __init__(self, push: Push, members: list[int]) -> None:
        self.parcels = [push.parcels[i] for i in members]
        sizes = (parcel.row_map.largest for parcel in self.parcels)
        self.offsets = [0, *itertools.accumulate(sizes)][:-1]
        """By table: what is added to its places."""
        self._push, self._members = push, members

    def cut(self, number: int) -> list[_Part]:
        """Some of the rows each. See [Note: parts]."""
        push, members = self._push, self._members
        values = [p.values if p.packed is None else p.packed for p in self.parcels]
        sent, received = push.sent[members], push.received[members]
        if number == 1:  # What comes is looked at when this has been sent.
            return [_Part(values, sent, received)]
        going = _behind_each_other(push.going, push.sent, members, self.offsets)
        coming = self.coming()
        joined = _joined(values, sent)
        sent, order = _by_part(going, sent.sum(0), number)
        received, order_here = _by_part(coming, received.sum(0), number)
        pieces = joined.index_select(0, order).split_with_sizes(sent.sum(1).tolist())
        places = coming[order_here].split_with_sizes(received.sum(1).tolist())
        return [
            _Part([pieces[i]], sent[i : i + 1], received[i : i + 1], places[i])
            for i in range(number)
        ]

    def coming(self) -> Tensor:
        """The places of what comes: by worker, and in each by table."""
        push = self._push
        return _behind_each_other(push.coming, push.received, self._members, self.offsets)


def _joined(values: Sequence[Tensor], sizes: Tensor) -> Tensor:
    """Values of each table by worker, of which there are `sizes[table][worker]`: as one tensor by
    worker, and in each by table."""
    if len(values) == 1:
        return values[0]
    pieces = [
        each.split_with_sizes(size.tolist()) for each, size in zip(values, sizes, strict=True)
    ]
    return torch.cat(list(itertools.chain.from_iterable(zip(*pieces, strict=True))))


def _behind_each_other(
    places: Tensor, sizes: Tensor, members: list[int], offsets: list[int]
) -> Tensor:
    """Places by worker and in each by table, of which there are `sizes[table, worker]`: those of
    some tables, with what is added to them."""
    if len(sizes) == 1:
        return places
    added = sizes.new_full((len(sizes),), -1)
    added[members] = sizes.new_tensor(offsets)
    shifts = torch.repeat_interleave(added.repeat(sizes.shape[1]), sizes.t().flatten())
    if len(members) < len(sizes):
        is_member = shifts >= 0
        places, shifts = places[is_member.to(places.device)], shifts[is_member]
    return places + shifts.to(places.device)


def _by_part(places: Tensor, sizes: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Of places by worker: how many there are by part and worker, and their order by these."""
    parts = places % number
    workers = torch.repeat_interleave(sizes).to(parts.device)
    counts = torch.bincount(parts * len(sizes) + workers, minlength=number * len(sizes))
    return counts.cpu().reshape(number, len(sizes)), torch.argsort(parts, stable=True)


def _shipped(peers: Peers, parts: Sequence[_Part]) -> Shipment:
    """One part of each bundle."""
    tensors = [each for part in parts for each in part.values]
    places = iter(range(len(tensors)))
    return Shipment(
        peers,
        tensors,
        torch.cat([part.sent for part in parts]),
        torch.cat([part.received for part in parts]),
        groups=[list(itertools.islice(places, len(part.values))) for part in parts],
    )


class _Sum:
    """What comes of a bundle, part by part, summed by row.

    The rows are in the order they have without parts, so that what is worked out of them does not
    depend on a number that a clock chose.
    """

    def __init__(self, bundle: _Bundle, parts: Sequence[_Part], wire: Wire) -> None:
        """Work out which rows are the same, while they travel."""
        self._parcels, self._offsets, self._wire = bundle.parcels, bundle.offsets, wire
        self._like = bundle.parcels[0].values[:0]
        coming = [bundle.coming() if part.coming is None else part.coming for part in parts]
        self._merges = [Merge.of(places) for places in coming]
        self._slots = self._merges[0].slots
        if len(parts) > 1:
            self._slots, order = torch.sort(torch.cat([merge.slots for merge in self._merges]))
            places = torch.empty_like(order)
            places.scatter_(0, order, torch.arange(len(order), device=order.device))
            self._places = places.split_with_sizes([len(merge.slots) for merge in self._merges])
            self._values = self._like.new_empty((len(order), *self._like.shape[1:]))

    def add(self, number: int, rows: Tensor, scale: float) -> None:
        """The rows of a part have come."""
        total = self._merges[number].summed(unpacked(rows, self._like, self._wire), scale)
        if len(self._merges) == 1:
            self._values = total
        else:
            put_rows(self._values, self._places[number], total)

    def by_table(self) -> list[Parcel]:
        offsets = torch.tensor(self._offsets, device="cpu")
        edges = torch.searchsorted(self._slots, offsets.to(self._slots.device)).cpu()
        sizes = torch.diff(edges, append=edges.new_tensor([len(self._slots)]))
        slots = self._slots - spread(offsets, sizes, self._slots.device)
        return [
            Parcel(parcel.name, parcel.row_map, *each)
            for parcel, *each in zip(
                self._parcels,
                slots.split_with_sizes(sizes.tolist()),
                self._values.split_with_sizes(sizes.tolist()),
                strict=True,
            )
        ]


def _book_pull(
    peers: Peers, name: str, size_bytes: int, counts: Sequence[int], asked: Sequence[int]
) -> None:
    wanted = sum(counts) - counts[peers.rank]
    served = sum(asked) - asked[peers.rank]
    peers.ledger.add(
        name,
        sent_bytes=cost.pull_bytes(wanted, served, size_bytes),
        received_bytes=cost.pull_bytes(served, wanted, size_bytes),
        asked_rows=sum(counts),
    )


def _book_push(
    peers: Peers, push: Push, chosen: Sequence[int], seconds: float, updated: Sequence[int]
) -> None:
    parcels = [push.parcels[i] for i in chosen]
    away, here = (
        (counts.sum(1) - counts[:, peers.rank])[list(chosen)].tolist()
        for counts in (push.sent, push.received)
    )
    pushed = push.sent.sum(1)[list(chosen)].tolist()
    sizes = [row_bytes(parcel.values, peers.wire) for parcel in parcels]
    moved = [(a + h) * size for a, h, size in zip(away, here, sizes, strict=True)]
    total = max(sum(moved), 1)
    for i, parcel in enumerate(parcels):
        peers.ledger.add(
            parcel.name,
            sent_bytes=cost.push_bytes(away[i], sizes[i]),
            received_bytes=cost.push_bytes(here[i], sizes[i]),
            seconds=seconds * moved[i] / total,
            pushed_rows=pushed[i],
            updated_rows=updated[i],
        )
