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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallax import cost
from parallax.exchange.header import Fault, Operation
from parallax.exchange.peers import Peers
from parallax.exchange.shipment import Family, Shipment, families
from parallax.shard import Merge, RowMap, laid_out, put_rows, regrouped
from parallax.wire import packed, row_bytes, unpacked

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
    counts = row_map.counts(slots)
    places = row_map.places(slots)
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
    places: Tensor
    """Which rows those are, by worker and in each by parcel."""

    def cut(self, number: int) -> list[Push]:
        """As several, each with some of the rows. See [Note: parts]."""
        places = [parcel.row_map.places(parcel.slots) % number for parcel in self.parcels]
        orders = [torch.argsort(each, stable=True) for each in places]
        sent = torch.stack(
            [
                _part_counts(each, counts, number)
                for each, counts in zip(places, self.sent, strict=True)
            ],
            1,
        )
        here = self.places % number
        received = _part_counts(here, self.received.t().flatten(), number)
        received = received.reshape(number, *self.received.t().shape).transpose(1, 2)
        came = self.places[torch.argsort(here, stable=True)]
        pieces = came.split_with_sizes(received.sum((1, 2)).tolist())
        parcels = _cut_parcels(self.parcels, orders, sent.sum(2))
        return [Push(parcels[i], sent[i], received[i], pieces[i]) for i in range(number)]


def announce_push(
    peers: Peers, operation: Operation, parcels: list[Parcel], flags: Sequence[bool]
) -> tuple[Push, list[bool]]:
    """Tell the owners which rows have gradients; also raise flags, and hear those of all.

    Every worker gives the same tables in the same order, with the rows that it has itself.
    """
    ids, counts = None, torch.empty((0, peers.num_workers), dtype=torch.int64)
    if parcels:
        counts, places = laid_out([p.row_map for p in parcels], [p.slots for p in parcels])
        ids = places[regrouped(counts.t()).to(places.device)]
    told = peers.announce(operation, counts.t().tolist(), ids=ids, flags=flags, is_met=True)
    received = torch.tensor(told.counts, dtype=torch.int64).t()
    return Push(parcels, counts, received, told.ids.long()), told.flags


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
    belongs to the part `place % number`, which its senders and its owner know alike and which
    spreads the rows that are touched most.
    """

    def __init__(
        self, peers: Peers, push: Push, chosen: Sequence[int], num_partitions: int = 1
    ) -> None:
        """Send those of the chosen tables."""
        self.waited_seconds = 0.0
        pushes = [push] if num_partitions == 1 else push.cut(num_partitions)
        self._parts = [_Part(peers, part, chosen) for part in pushes]
        for part in self._parts:  # While they travel.
            part.prepare()

    def summed(self, scale: float, waiting: Callable[[], Waiting]) -> list[Parcel]:
        """By row, times `scale`; `waiting` says what a wait belongs to."""
        found = []
        for part in self._parts:
            start = time.perf_counter()
            with waiting():
                arrived = part.shipment.arrived()
            self.waited_seconds += time.perf_counter() - start
            found.append(part.summed(arrived, scale))
        return found[0] if len(found) == 1 else [_joined(each) for each in zip(*found, strict=True)]


class _Part:
    """Of what is brought: what travels and is summed together."""

    def __init__(self, peers: Peers, push: Push, chosen: Sequence[int]) -> None:
        self._push, self._chosen, self._wire = push, chosen, peers.wire
        self._parcels = [push.parcels[i] for i in chosen]
        self._groups = families([p.values for p in self._parcels])
        values = [p.values if p.packed is None else p.packed for p in self._parcels]
        sent, received = push.sent[list(chosen)], push.received[list(chosen)]
        self.shipment = Shipment(peers, values, sent, received, groups=self._groups)

    def prepare(self) -> None:
        """Work out which rows are the same."""
        self._merges = [
            _Merging.of(self._push, [self._chosen[i] for i in members]) for members in self._groups
        ]

    def summed(self, arrived: Sequence[Family], scale: float) -> list[Parcel]:
        found: dict[int, Parcel] = {}
        for merging, family in zip(self._merges, arrived, strict=True):
            like = self._parcels[family.members[0]].values
            summed = merging.summed(unpacked(family.rows, like, self._wire), scale)
            found |= dict(zip(family.members, summed, strict=True))
        return [found[i] for i in range(len(self._parcels))]


def _joined(parts: Sequence[Parcel]) -> Parcel:
    """Of one table; no row is in two parts. In the order they have without parts, so that what
    is worked out of them does not depend on a number that a clock chose."""
    slots, order = torch.sort(torch.cat([part.slots for part in parts]))
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)).to(order))
    values = parts[0].values.new_empty((len(order), *parts[0].values.shape[1:]))
    pieces = places.split_with_sizes([part.slots.size(0) for part in parts])
    for piece, part in zip(pieces, parts, strict=True):
        put_rows(values, piece, part.values)
    return replace(parts[0], slots=slots, values=values)


def _part_counts(parts: Tensor, sizes: Tensor, number: int) -> Tensor:
    """By part, and by consecutive piece of these sizes: how many of its rows are of the part."""
    pieces = torch.repeat_interleave(sizes).to(parts.device)
    counts = torch.bincount(parts * len(sizes) + pieces, minlength=number * len(sizes))
    return counts.cpu().reshape(number, len(sizes))


def _cut_parcels(
    parcels: Sequence[Parcel], orders: Sequence[Tensor], sizes: Tensor
) -> list[list[Parcel]]:
    """By part: of each parcel, `sizes[part, parcel]` rows in the order that sorts it by part."""
    found = []
    for parcel, order, each in zip(parcels, orders, sizes.t().tolist(), strict=True):
        pieces = order.split_with_sizes(each)
        found.append([_rows_of(parcel, piece) for piece in pieces])
    return [list(part) for part in zip(*found, strict=True)]


def _rows_of(parcel: Parcel, rows: Tensor) -> Parcel:
    slots = parcel.slots.index_select(0, rows)
    if parcel.packed is not None:  # Its values stay here.
        packed = parcel.packed.index_select(0, rows)
        return replace(parcel, slots=slots, values=parcel.values[:0], packed=packed)
    return replace(parcel, slots=slots, values=parcel.values.index_select(0, rows))


@dataclass(frozen=True)
class _Merging:
    """How the rows of a family come together. See [Note: families] in shipment.py."""

    parcels: list[Parcel]
    merge: Merge
    offsets: list[int]
    """What is added to the places of each table, so that no two have the same."""

    @staticmethod
    def of(push: Push, members: list[int]) -> _Merging:
        parcels = [push.parcels[i] for i in members]
        offsets = [0, *itertools.accumulate(parcel.row_map.span for parcel in parcels)]
        # What no member gets is below zero.
        added = torch.full((len(push.parcels),), -1).index_copy_(
            0, torch.tensor(members), torch.tensor(offsets[:-1])
        )
        sizes = push.received.t().flatten()
        shifts = torch.repeat_interleave(added.repeat(push.received.shape[1]), sizes)
        shifts = shifts.to(push.places.device)
        places = push.places
        if len(members) < len(push.parcels):
            places, shifts = places[shifts >= 0], shifts[shifts >= 0]
        return _Merging(parcels, Merge.of(places + shifts), offsets)

    def summed(self, values: Tensor, scale: float) -> list[Parcel]:
        total = self.merge.summed(values, scale)
        slots = self.merge.slots
        edges = torch.searchsorted(slots, torch.tensor(self.offsets, device=slots.device)).tolist()
        return [
            Parcel(parcel.name, parcel.row_map, slots[low:high] - offset, total[low:high])
            for parcel, offset, low, high in zip(
                self.parcels, self.offsets, edges, edges[1:], strict=False
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
