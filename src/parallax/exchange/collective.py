"""Synchronous exchange: rows and row gradients go between all workers at once.

A lookup is a header with the ids, and an exchange of rows. A push of all tables is a header with
their ids, and an exchange of gradients for each dtype. Rows that a worker owns
itself do not travel.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax import cost
from parallax.exchange.header import Fault, Operation
from parallax.exchange.peers import Peers
from parallax.exchange.shipment import Shipment, families
from parallax.shard import Merge, RowMap, laid_out, regrouped
from parallax.wire import packed, row_bytes, unpacked


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
    peers: Peers, operation: Operation, push: Push, chosen: Sequence[int]
) -> list[Parcel]:
    """Bring the gradients of the chosen tables' rows to their owners; average over workers."""
    parcels = [push.parcels[i] for i in chosen]
    if peers.num_workers == 1 or not parcels:
        return parcels
    start = time.perf_counter()
    with peers.waiting(operation):
        bring = Bring(peers, push, chosen)
    seconds = time.perf_counter() - start
    found = bring.summed(1 / peers.num_workers)
    _book_push(peers, push, chosen, seconds, [parcel.slots.size(0) for parcel in found])
    return found


class Bring:
    """Gradients that have come to where they are summed."""

    def __init__(self, peers: Peers, push: Push, chosen: Sequence[int]) -> None:
        """Wait for those of the chosen tables."""
        self._parcels = [push.parcels[i] for i in chosen]
        self._wire = peers.wire
        sent, received = push.sent[list(chosen)], push.received[list(chosen)]
        groups = families([p.values for p in self._parcels])
        values = [p.values if p.packed is None else p.packed for p in self._parcels]
        shipment = Shipment(peers, values, sent, received, groups=groups)
        # While the gradients travel.
        self._merges = [_Merging.of(push, [chosen[i] for i in members]) for members in groups]
        self._arrived = shipment.arrived()

    def summed(self, scale: float) -> list[Parcel]:
        """By row, times `scale`."""
        found: dict[int, Parcel] = {}
        for merging, family in zip(self._merges, self._arrived, strict=True):
            like = self._parcels[family.members[0]].values
            summed = merging.summed(unpacked(family.rows, like, self._wire), scale)
            found |= dict(zip(family.members, summed, strict=True))
        return [found[i] for i in range(len(self._parcels))]


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
    sizes = [row_bytes(parcel.values, peers.wire) for parcel in parcels]
    moved = [(a + h) * size for a, h, size in zip(away, here, sizes, strict=True)]
    total = max(sum(moved), 1)
    for i, parcel in enumerate(parcels):
        peers.ledger.add(
            parcel.name,
            sent_bytes=cost.push_bytes(away[i], sizes[i]),
            received_bytes=cost.push_bytes(here[i], sizes[i]),
            seconds=seconds * moved[i] / total,
            updated_rows=updated[i],
        )
