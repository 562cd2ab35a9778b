"""Workers of one host pull and push together, so that a row crosses the host's link once each way.

[Note: speakers] Each worker speaks for its host with some of the owners: with those that have, on
their own hosts, the place that it has here. Before a pull workers tell the speakers which rows they
want; a speaker pulls the distinct ones of all, and hands them on. Before a push they give the
speakers their gradients, which these sum by row. Between hosts everything goes on as it would
without, only with fewer rows. An owner on the same host is its own speaker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallax.cluster.topology import Hosts
from parallax.comm.header import Operation
from parallax.comm.peers import Peers
from parallax.comm.push import Incoming, Outgoing, RowSums
from parallax.comm.rows import RowExchange, by_group, row_size
from parallax.planning.cost import ID_BYTES
from parallax.tables.host import Counts
from parallax.tables.space import Keys, SlotSpace, num_distinct

MAX_KEYS = 2**31
"""Keys travel as 32 bits here."""


class HostMerge:
    """The workers of this host."""

    def __init__(self, peers: Peers, hosts: Hosts, *, is_on: bool) -> None:
        assert peers.host is not None
        self._peers = peers
        self._inside = peers.host
        places = {rank: place for ranks in hosts.workers for place, rank in enumerate(ranks)}
        here = [places[owner] % hosts.num_local_workers for owner in sorted(places)]
        self._speakers: Counts = np.array(here, np.int64)
        """By owner: who speaks with it."""
        self.switch(is_on)

    @property
    def is_on(self) -> bool:
        """The same on all workers. Otherwise each pulls and pushes for itself."""
        return self._peers.merges_host

    def switch(self, is_on: bool) -> None:
        """Merge from the next operation on, or stop it. On all workers."""
        self._peers.switch_host_merge(is_on)

    def union(self, operation: Operation, space: SlotSpace, wanted: Keys) -> Union:
        """Join what the workers of the host want. All of them take part."""
        if not self.is_on:
            return Union(wanted)
        with self._peers.waiting(operation):
            told = self._tell(operation, space, wanted)
        return Union(wanted) if told is None else _HostUnion(self._inside, space, told)

    def merge(
        self, operation: Operation, space: SlotSpace, found: Keys, values: Sequence[Tensor]
    ) -> tuple[Keys, list[Tensor]]:
        """Sum the gradients of the host's workers by row. `values` are by group, in the order of
        the keys. All workers of the host take part."""
        if not self.is_on:
            return found, list(values)
        if not space.num_tables:
            self._peers.meet_on_host(operation)
            return found, list(values)
        with self._peers.waiting(operation):
            told = self._tell(operation, space, found)
            if told is None:
                return found, list(values)
            sent, received = (space.group_sums(each.T) for each in (told.sent, told.received))
            outgoing = [
                Outgoing(rows.index_select(0, order - first), counts, keys)
                for rows, order, first, counts, keys in zip(
                    values,
                    by_group(told.order, sent.T),
                    _firsts(space, found),
                    sent,
                    by_group(told.asked, sent.T),
                    strict=True,
                )
            ]
            incoming = Incoming(by_group(told.keys, received.T), received, 1)
            sums = RowSums(self._inside, outgoing, incoming, values)
        merged = sums.wait(1.0, lambda: self._peers.waiting(operation))
        _book(self._inside, sent, values, sums.waited_seconds)
        keys = torch.cat([keys for keys, _ in merged])
        return Keys(keys, space.count(keys)), [rows for _, rows in merged]

    def _tell(self, operation: Operation, space: SlotSpace, found: Keys) -> _Told | None:
        """Give each key to whoever speaks with its owner."""
        num_here = self._inside.num_workers
        speakers = torch.from_numpy(self._speakers).to(space.device)[space.owners(found.counts)]
        order = torch.argsort(speakers, stable=True)
        sent = np.zeros((num_here, space.num_tables), np.int64)
        np.add.at(sent, self._speakers, found.counts.T)
        asked = found.keys[order]
        told = self._peers.announce_on_host(operation, sent, asked)
        if told is None:
            return None
        away = len(asked) - int(sent[self._inside.rank].sum())
        self._inside.ledger.local_bytes += ID_BYTES * away
        return _Told(found, sent, told.counts, order, asked, told.ids.long())


@dataclass(frozen=True)
class _Told:
    """Which keys the workers of a host have for each other."""

    own: Keys
    sent: Counts
    """By speaker and table: how many of this worker's keys are its."""
    received: Counts
    """By neighbour and table: how many keys it gave to this worker."""
    order: Tensor
    """Which of this worker's keys go, by speaker."""
    asked: Tensor
    """What goes, in that order."""
    keys: Tensor
    """What came, by neighbour."""


class Union:
    """Rows that a worker asks the owners for."""

    is_merged = False
    """Whether it asks for other workers of its host too. Merging may be switched while rows are on
    their way, so this is what counts for them."""

    def __init__(self, wanted: Keys) -> None:
        self.wanted = wanted

    def deliver(self, rows: list[Tensor]) -> list[Tensor]:
        """Of the rows that came, return those that this worker wants itself; by group."""
        return rows


class _HostUnion(Union):
    """What the workers of a host want, as far as this one speaks with the owners."""

    is_merged = True

    def __init__(self, inside: Peers, space: SlotSpace, told: _Told) -> None:
        self._inside, self._space, self._told = inside, space, told
        ordered, order = torch.sort(told.keys)
        seen = num_distinct(ordered)
        self._places = torch.empty_like(order).scatter_(0, order, seen[1:] - 1)
        """Of what came: which of the distinct keys it is."""
        keys = torch.unique_consecutive(ordered)
        super().__init__(Keys(keys, space.count(keys)))

    def deliver(self, rows: list[Tensor]) -> list[Tensor]:
        told, inside, space = self._told, self._inside, self._space
        sent, received = (space.group_sums(each.T) for each in (told.received, told.sent))
        served = [
            each.index_select(0, places - first)
            for each, places, first in zip(
                rows, by_group(self._places, sent.T), _firsts(space, self.wanted), strict=True
            )
        ]
        start = time.perf_counter()
        came = RowExchange(inside, served, sent, received).wait()
        _book(inside, sent, served, time.perf_counter() - start)
        orders = by_group(told.order, received.T)
        return [
            torch.empty_like(each).index_copy_(0, order - first, each)
            for each, order, first in zip(came, orders, _firsts(space, told.own), strict=True)
        ]


def _firsts(space: SlotSpace, found: Keys) -> list[int]:
    """By group: where its keys begin."""
    sizes = space.group_sums(found.counts).sum(1)
    starts: list[int] = (sizes.cumsum() - sizes).tolist()
    return starts


def _book(inside: Peers, sent: Counts, rows: Sequence[Tensor], seconds: float) -> None:
    away = sent.sum(1) - sent[:, inside.rank]
    inside.ledger.local_seconds += seconds
    inside.ledger.local_bytes += int(away @ np.array([row_size(each) for each in rows]))
