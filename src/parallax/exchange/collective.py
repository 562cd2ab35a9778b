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
import torch.distributed as dist
from torch import Tensor

from parallax import cost
from parallax.exchange.header import Fault, Operation
from parallax.exchange.peers import Lane, Peers
from parallax.shard import RowMap, merged


@dataclass(frozen=True)
class Parcel:
    """The gradients of some rows of a table: the sender's slots, or the owner's places."""

    name: str
    row_map: RowMap
    slots: Tensor
    values: Tensor


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
    told = peers.announce(operation, [[count] for count in counts], ids=places, fault=fault)
    if any(code for code, _ in told.faults):
        return shard[:0], told.faults
    served = shard.index_select(0, told.ids)
    if peers.num_workers == 1 or told.largest == 0:  # nobody needs a row that it has not yet
        return served, told.faults
    asked = [count for (count,) in told.counts]
    with peers.ledger.timed(operation.subject), peers.waiting(operation):
        rows = peers.exchange(served, asked, counts)
    _book_pull(peers, operation.subject, row_bytes(shard), counts, asked)
    return rows, told.faults


@dataclass(frozen=True)
class Push:
    """A push under way: all workers know whose rows go where, and wait for the gradients."""

    parcels: list[Parcel]
    sent: Tensor
    """By worker and parcel: rows that go there."""
    received: Tensor
    """By worker and parcel: rows that come from there."""
    places: list[list[Tensor]]
    """By parcel and worker: which rows those are."""


def announce_push(
    peers: Peers, operation: Operation, parcels: list[Parcel], flags: Sequence[bool]
) -> tuple[Push, list[bool]]:
    """Tell the owners which rows have gradients; also raise flags, and hear those of all.

    Every worker gives the same tables in the same order, with the rows that it has itself.
    """
    counts = list(zip(*(p.row_map.counts(p.slots) for p in parcels), strict=True))
    counts = counts or [()] * peers.num_workers
    parts = [
        p.row_map.places(p.slots).split(c)
        for p, c in zip(parcels, zip(*counts, strict=True), strict=True)
    ]
    ids = torch.cat(_by_worker(parts)) if parts else None
    told = peers.announce(operation, counts, ids=ids, flags=flags)
    pieces = told.ids.long().split([count for row in told.counts for count in row])
    places = [list(pieces[i :: len(parcels)]) for i in range(len(parcels))]
    push = Push(parcels, torch.tensor(counts), torch.tensor(told.counts), places)
    return push, told.flags


def complete_push(
    peers: Peers, operation: Operation, push: Push, chosen: Sequence[int]
) -> list[Parcel]:
    """Bring the gradients of the chosen tables' rows to their owners; average over workers."""
    parcels = [push.parcels[i] for i in chosen]
    if peers.num_workers == 1 or not parcels:
        return parcels
    columns = list(chosen)
    sent, received = push.sent[:, columns], push.received[:, columns]
    start = time.perf_counter()
    with peers.waiting(operation):
        values = Shipment(peers, [p.values for p in parcels], sent, received).arrived()
    _book_push(peers, parcels, sent, received, time.perf_counter() - start)
    return [
        Parcel(parcel.name, parcel.row_map, *merged(push.places[i], pieces, 1 / peers.num_workers))
        for i, parcel, pieces in zip(chosen, parcels, values, strict=True)
    ]


def row_bytes(rows: Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()


class Shipment:
    """Several tensors on their way, each with its rows sorted by receiver.

    `sent[worker, i]` rows of tensor i go to a worker, `received[worker, i]` come from it. Tensors
    of one dtype share an exchange, whatever the lengths of their rows.
    """

    def __init__(
        self,
        peers: Peers,
        tensors: Sequence[Tensor],
        sent: Tensor,
        received: Tensor,
        lane: Lane = Lane.ROWS,
    ) -> None:
        self._peers = peers
        self._tensors = tensors
        self._loads: list[tuple[list[int], Tensor, Tensor, dist.Work | None]] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            self._load(chosen, sent[:, chosen], received[:, chosen], lane)

    def arrived(self) -> list[list[Tensor]]:
        """Wait for what comes: by tensor, the pieces of each sender."""
        found: list[list[Tensor]] = [[] for _ in self._tensors]
        for chosen, flat, sizes, work in self._loads:
            self._peers.wait(work)
            pieces = flat.split(sizes.flatten().tolist())
            for place, i in enumerate(chosen):
                shape = self._tensors[i].shape[1:]
                found[i] = [piece.reshape(-1, *shape) for piece in pieces[place :: len(chosen)]]
        return found

    def _load(self, chosen: list[int], sent: Tensor, received: Tensor, lane: Lane) -> None:
        tensors = [self._tensors[i] for i in chosen]
        if len(tensors) == 1:
            packed, sizes_out, sizes_in = tensors[0], sent, received
        else:
            widths = torch.tensor([tensor.shape[1:].numel() for tensor in tensors])
            parts = [tensor.split(sent[:, i].tolist()) for i, tensor in enumerate(tensors)]
            packed = torch.cat([part.reshape(-1) for part in _by_worker(parts)])
            sizes_out, sizes_in = sent * widths, received * widths
        flat, work = self._peers.start_exchange(
            packed, sizes_out.sum(1).tolist(), sizes_in.sum(1).tolist(), lane
        )
        self._loads.append((chosen, flat, sizes_in, work))


def _by_worker(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return list(itertools.chain.from_iterable(zip(*parts, strict=True)))


def _book_pull(
    peers: Peers, name: str, size_bytes: int, counts: Sequence[int], asked: Sequence[int]
) -> None:
    wanted = sum(counts) - counts[peers.rank]
    served = sum(asked) - asked[peers.rank]
    peers.ledger.add(
        name,
        sent_bytes=cost.pull_bytes(wanted, served, size_bytes),
        received_bytes=cost.pull_bytes(served, wanted, size_bytes),
        rows=sum(counts),
    )


def _book_push(
    peers: Peers, parcels: Sequence[Parcel], sent: Tensor, received: Tensor, seconds: float
) -> None:
    away, here = ((counts.sum(0) - counts[peers.rank]).tolist() for counts in (sent, received))
    sizes = [row_bytes(parcel.values) for parcel in parcels]
    moved = [(a + h) * size for a, h, size in zip(away, here, sizes, strict=True)]
    for i, parcel in enumerate(parcels):
        peers.ledger.add(
            parcel.name,
            sent_bytes=cost.push_bytes(away[i], sizes[i]),
            received_bytes=cost.push_bytes(here[i], sizes[i]),
            seconds=seconds * moved[i] / max(sum(moved), 1),
        )
