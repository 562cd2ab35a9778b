"""Workers of one host ask and push together, so that a row crosses the host's link once each way.

[Note: neighbours] Each worker speaks for its host with some of the owners: with those that have, on
their own hosts, the place that it has here. Before a pull workers tell the speakers which rows they
want; a speaker pulls the distinct ones of all, and hands them on. Before a push they give the
speakers their gradients, which these sum by row. Between hosts all goes on as it would without,
only with fewer rows. An owner on the same host is its own speaker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallax.cost import ID_BYTES
from parallax.errors import OutOfStepError
from parallax.exchange.collective import Bring, Parcel, Push
from parallax.exchange.header import Answer, Operation, Verb
from parallax.exchange.peers import Peers
from parallax.exchange.shipment import Shipment
from parallax.hosts import Hosts
from parallax.shard import Atlas, laid_out, regrouped, spread
from parallax.tables.rowmap import RowMap


@dataclass(frozen=True)
class Told:
    """Which rows the workers of a host have for each other."""

    sent: Tensor
    """By table and speaker: how many of this worker's rows are its."""
    received: Tensor
    """By table and neighbour: how many rows it gave to this worker."""
    order: Tensor
    """Of this worker's rows, by table: which go, by speaker and in each by table."""
    asked: Tensor
    """What goes, in that order."""
    slots: Tensor
    """What came, by neighbour and in each by table."""


class Errand:
    """Rows that a worker asks of their owners."""

    def __init__(self, slots: list[Tensor]) -> None:
        self.slots = slots
        """By table: distinct and sorted."""

    def delivered(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Of the rows that were found there, those that this worker wants itself."""
        return list(rows)


class Neighbours:
    """The workers of this host."""

    def __init__(self, peers: Peers, inside: Peers, hosts: Hosts, *, is_on: bool) -> None:
        self.is_on = is_on
        """The same on all workers. Otherwise each asks and pushes for itself."""
        self._peers = peers
        self._inside = inside
        places = {rank: place for ranks in hosts.workers for place, rank in enumerate(ranks)}
        here = [places[owner] % hosts.num_local_workers for owner in sorted(places)]
        self._speakers = torch.tensor(here)
        """By owner: who speaks with it."""
        peers.meet_inside = self._meet

    def ask(self, operation: Operation, maps: Sequence[RowMap], slots: Sequence[Tensor]) -> Errand:
        """Join what the workers of the host want. All of them take part."""
        if not self.is_on:
            return Errand(list(slots))
        with self._peers.waiting(operation):
            told = self._tell(operation, maps, slots)
        return Errand(list(slots)) if told is None else _Joined(self._inside, told, maps)

    def merge(self, operation: Operation, parcels: list[Parcel]) -> list[Parcel]:
        """Sum the gradients of the host's workers by row. All of them take part."""
        if not self.is_on:
            return parcels
        if not parcels:
            self._meet(operation)
            return parcels
        maps = [parcel.row_map for parcel in parcels]
        with self._peers.waiting(operation):
            told = self._tell(operation, maps, [parcel.slots for parcel in parcels])
            if told is None:
                return parcels
            push = Push(_sorted(parcels, told), told.sent, told.received, told.asked, told.slots)
            bring = Bring(self._inside, push, range(len(parcels)))
        summed = bring.summed(1.0, lambda: self._peers.waiting(operation))
        values = [parcel.values for parcel in parcels]
        _book(self._inside, told.sent, values, bring.waited_seconds)
        return [replace(each, row_map=own) for each, own in zip(summed, maps, strict=True)]

    def _meet(self, operation: Operation) -> None:
        """See that the workers of the host are in one operation. See `_announced`."""
        if self.is_on:
            with self._peers.waiting(operation):
                self._announced(operation, None, None)

    def _announced(
        self, operation: Operation, counts: list[list[int]] | None, ids: Tensor | None
    ) -> Answer | None:
        """What the workers of the host tell each other; None if they are in different operations.

        Then this worker goes on to where all meet, so that all of them learn who is where.
        """
        try:
            return self._inside.announce(operation, counts, ids=ids)
        except OutOfStepError:
            if operation.verb is Verb.AHEAD:  # It is not announced to all.
                raise
            return None

    def _tell(
        self, operation: Operation, maps: Sequence[RowMap], slots: Sequence[Tensor]
    ) -> Told | None:
        """Give each row to whoever speaks with its owner."""
        num_tables, num_here = len(maps), self._inside.num_workers
        joined = torch.cat(list(slots))
        device = joined.device
        tables = torch.repeat_interleave(torch.tensor([len(each) for each in slots])).to(device)
        by_owner, _ = laid_out(maps, slots)
        owners = torch.arange(by_owner.shape[1], device=by_owner.device).repeat(num_tables)
        owners = spread(owners, by_owner.flatten(), device)
        keys = self._speakers.to(device)[owners] * num_tables + tables
        order = torch.argsort(keys, stable=True)
        counts = torch.bincount(keys, minlength=num_here * num_tables).cpu()
        sent = counts.reshape(num_here, num_tables)
        asked = joined[order]
        told = self._announced(operation, sent.tolist(), asked)
        if told is None:
            return None
        received = torch.tensor(told.counts, dtype=torch.int64)
        away = len(joined) - int(sent[self._inside.rank].sum())
        self._inside.ledger.local_bytes += ID_BYTES * away
        return Told(sent.t(), received.t(), order, asked, told.ids.long())


class _Joined(Errand):
    """What the workers of a host want, as far as this one speaks with the owners."""

    def __init__(self, inside: Peers, told: Told, maps: Sequence[RowMap]) -> None:
        self._inside = inside
        self._told = told
        device = told.slots.device
        starts = Atlas.of(maps).starts.to(device)
        by_table = told.slots[regrouped(told.received).to(device)]
        sizes = told.received.sum(1)
        tables = torch.repeat_interleave(sizes).to(device)
        keys, places = torch.unique(by_table + starts[tables], return_inverse=True)
        edges = torch.searchsorted(keys, starts)
        parts = keys.tensor_split(edges[1:].cpu())
        super().__init__([part - start for part, start in zip(parts, starts, strict=True)])
        self._places = (places - edges[tables]).split_with_sizes(sizes.tolist())
        """By table and in each by neighbour: which of the slots it wants."""

    def delivered(self, rows: Sequence[Tensor]) -> list[Tensor]:
        told, inside = self._told, self._inside
        served = [each.index_select(0, at) for each, at in zip(rows, self._places, strict=True)]
        start = time.perf_counter()
        arrived = Shipment(inside, served, told.received, told.sent).arrived()
        _book(inside, told.received, served, time.perf_counter() - start)
        found: dict[int, Tensor] = {}
        tables = torch.repeat_interleave(told.sent.sum(1)).to(told.order.device)
        for family in arrived:
            order = told.order
            if len(family.members) < len(rows):
                members = torch.tensor(family.members, device=order.device)
                order = order[torch.isin(tables[order], members)]
            mine = family.rows.index_select(0, torch.argsort(order))
            sizes = told.sent[family.members].sum(1).tolist()
            found |= dict(zip(family.members, mine.split_with_sizes(sizes), strict=True))
        return [found[i] for i in range(len(rows))]


def _sorted(parcels: Sequence[Parcel], told: Told) -> list[Parcel]:
    """Each with its rows by speaker, who takes slots as they are."""
    sizes = told.sent.sum(1)
    starts = sizes.cumsum(0) - sizes
    by_table = told.order[regrouped(told.sent).to(told.order.device)]
    found = []
    for parcel, order, start in zip(
        parcels, by_table.split_with_sizes(sizes.tolist()), starts.tolist(), strict=True
    ):
        num_rows = parcel.row_map.num_rows
        whole = RowMap(num_rows, (0, num_rows), multiplier=1)
        places = order - start
        found.append(Parcel(parcel.name, whole, parcel.slots[places], parcel.values[places]))
    return found


def _book(inside: Peers, sent: Tensor, rows: Sequence[Tensor], seconds: float) -> None:
    away = sent.sum(1) - sent[:, inside.rank]
    sizes = torch.tensor([each.shape[1:].numel() * each.element_size() for each in rows])
    inside.ledger.local_seconds += seconds
    inside.ledger.local_bytes += int(away @ sizes)
