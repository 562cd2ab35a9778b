"""(parameter, cluster, route) → bytes, messages, seconds. Pure functions.

N workers on H hosts, k on each. A parameter has S bytes, a row of a table B; a step touches U
rows on a worker, U_h distinct ones on a host. An id takes 4 bytes, because it travels as a place in
its owner's shard (8 where torch gathers sparse gradients). Sent by a worker, and as much received:

    all-reduced    2·S·(N-1)/N               a ring: each part is summed on its way, then spread
    sharded        2·U·(B+4)·(N-1)/N         rows pulled and pushed, each with its id
    gathered       (N-1)·U·(B+8)             DDP, Horovod, DeepSpeed: every worker gets all rows
    served         2·S·(N-1)/N               a dense parameter kept by owners: pulled and pushed

Sent over a host's link, if there are several hosts:

    all-reduced    2·S·(N-1)/N               the ring leaves a host once
    sharded        2·k·U·(B+4)·(H-1)/H
      merged       2·U_h·(B+4)·(H-1)/H       workers of a host ask and push together
    gathered       (N-1)·U·(B+8)             a ring as well
    served         2·k·S·(H-1)/H
      merged       (k+1)·S·(H-1)/H           gradients of a host's workers are summed first

Owners are spread evenly, so a worker serves as many rows as it asks for on average. Gradients of
prefetched rows carry no ids, so a sharded table then sends up to 4·U bytes less than this; the
ledger has what was sent.

A turn is a message that must have come before the next one is sent. A worker sends N-1 messages in
a turn in which all hear from all, and one in a turn of a ring:

    all-reduced    2·(N-1) messages          in 2·(N-1) turns of a ring, or directly in 2
    sharded        4·(N-1)                   in 4 turns, for all tables together; N-1 more for each
                                             part but the first, 2·(N-1) where rows come early
    gathered       N-1                       in N-1 turns of a ring, for each table
    served         2·(N-1)                   in 2 turns

A route takes

    max(link bytes ÷ link rate, bytes inside a host ÷ its rate) + turns · latency
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

Amount = TypeVar("Amount", int, Any)
"""A number, or an array of numbers."""

ID_BYTES = 4
"""An id travels as its place in the owner's shard, 32 bits."""
SPARSE_ID_BYTES = 8
"""Of a row in a sparse tensor of torch."""
DIRECT_BYTES = 1 << 20
"""Up to here gloo's ring is slower than two turns: measured with 4 and 8 hosts, see
docs/decisions.md."""


@dataclass(frozen=True)
class Link:
    """What a connection can do, each way."""

    bytes_per_second: float
    latency_seconds: float
    """Of a small message, from the call that sends it to the one that has it."""
    burst_bytes: float = 0.0
    """After a rest so many pass at once, as shaped links let them; only then the rate counts."""


@dataclass(frozen=True)
class Cluster:
    """Hosts alike, each with as many workers."""

    num_hosts: int
    workers_per_host: int
    between: Link
    """A host's link to all others."""
    within: Link
    """The memory of a host, by which its workers reach each other."""
    ring_seconds: float | None = None
    """Of a ring's turn, in which each worker hears one other; None where nobody measured it."""

    def with_hosts(self, number: int) -> Cluster:
        """As many hosts of the same kind. A ring that stays in one host was not measured if there
        were several, nor the other way round."""
        is_alike = (number == 1) == (self.num_hosts == 1)
        ring_seconds = self.ring_seconds if is_alike else None
        return replace(self, num_hosts=number, ring_seconds=ring_seconds)

    @staticmethod
    def unmeasured(num_hosts: int, workers_per_host: int) -> Cluster:
        """Of which bytes can be told, and no seconds."""
        unknown = Link(math.nan, math.nan)
        return Cluster(num_hosts, workers_per_host, unknown, unknown)

    @property
    def num_workers(self) -> int:
        return self.num_hosts * self.workers_per_host

    def head_start(self, rest_seconds: float) -> float:
        """Seconds that the links make up for, which have rested for so long."""
        if self.num_hosts == 1:
            return 0.0
        return min(self.between.burst_bytes / self.between.bytes_per_second, max(rest_seconds, 0.0))

    @property
    def latency_seconds(self) -> float:
        """Of a turn in which all workers take part."""
        return (self.between if self.num_hosts > 1 else self.within).latency_seconds


@dataclass(frozen=True)
class Touched:
    """Distinct rows of a table in a step, on average."""

    by_worker: float
    growth: float = 1.0
    """n workers touch `by_worker`·n^growth: 0 if all touch the same rows, 1 if none does."""

    @staticmethod
    def seen(rows: float, updated_rows: float, num_workers: int) -> Touched:
        """Of what a worker touched and an owner updated.

        Owners are spread evenly: what one updates tells what all workers touch together.
        """
        if num_workers == 1 or not rows or not updated_rows:
            return Touched(rows)
        growth = math.log(updated_rows * num_workers / rows) / math.log(num_workers)
        return Touched(rows, min(max(growth, 0.0), 1.0))

    def by(self, num_workers: int) -> float:
        return float(self.by_worker * num_workers**self.growth)


@dataclass(frozen=True)
class Traffic:
    """What is sent in a step; as much is received."""

    worker_bytes: float = 0.0
    """By a worker, to whomever."""
    link_bytes: float = 0.0
    """Over a host's link, by all its workers."""
    turns: int = 0
    messages: int = 0
    """By a worker."""

    def __add__(self, other: Traffic) -> Traffic:
        """In the same messages, as tables travel together."""
        return Traffic(
            self.worker_bytes + other.worker_bytes,
            self.link_bytes + other.link_bytes,
            max(self.turns, other.turns),
            max(self.messages, other.messages),
        )

    def beside(self, other: Traffic) -> Traffic:
        """At the same time, in messages of its own."""
        return replace(self + other, messages=self.messages + other.messages)

    def __mul__(self, share: float) -> Traffic:
        return replace(
            self, worker_bytes=self.worker_bytes * share, link_bytes=self.link_bytes * share
        )

    def limiting_bytes(self, cluster: Cluster) -> float:
        """Over what limits this cluster: a host's link, or the memory of the only one."""
        return self.link_bytes if cluster.num_hosts > 1 else self.worker_bytes

    def wire_seconds(self, cluster: Cluster, head_start: float = 0.0) -> float:
        """Without the latency of its turns; links have done some of it already."""
        inside = max(0.0, self.worker_bytes * cluster.workers_per_host - self.link_bytes)
        return max(
            self.link_bytes / cluster.between.bytes_per_second - head_start,
            inside / cluster.within.bytes_per_second,
        )

    def seconds(self, cluster: Cluster) -> float:
        return self.wire_seconds(cluster) + self.turns * cluster.latency_seconds


# A worker's bytes -------------------------------------------------------------------------


def allreduce_bytes(size_bytes: float, num_workers: int) -> float:
    """Sent by a worker to all-reduce `size_bytes`."""
    return 2 * size_bytes * (num_workers - 1) / num_workers


def pull_bytes(asked_rows: Amount, served_rows: Amount, row_bytes: Amount) -> Amount:
    """Sent by a worker that asks others for some rows and serves others some."""
    return asked_rows * ID_BYTES + served_rows * row_bytes


def push_bytes(pushed_rows: Amount, row_bytes: Amount, named_rows: Amount) -> Amount:
    """Sent by a worker that pushes the gradients of rows which others own, some of them with their
    ids: those that the owners have not from the pull."""
    return pushed_rows * row_bytes + named_rows * ID_BYTES


def sharded_bytes(rows: float, row_bytes: float, num_workers: int) -> float:
    """Sent by a worker on average, if each of N workers touches `rows` rows in a step."""
    return 2 * rows * (row_bytes + ID_BYTES) * (num_workers - 1) / num_workers


# Routes -----------------------------------------------------------------------------------


def all_reduced(size_bytes: float, cluster: Cluster, reductions: float = 1.0) -> Traffic:
    """A gradient of which each worker has a copy; `size_bytes` are those of all reductions."""
    sent, others = allreduce_bytes(size_bytes, cluster.num_workers), cluster.num_workers - 1
    if not sent:
        return Traffic()
    turns = 2 * others if size_bytes / reductions > DIRECT_BYTES else 2
    return Traffic(
        sent, sent if cluster.num_hosts > 1 else 0.0, turns, round(2 * others * reductions)
    )


def sharded(
    touched: Touched, row_bytes: float, cluster: Cluster, *, merges: bool = False
) -> Traffic:
    """A table by rows: ids, rows, ids with gradients. `merges`: once for all workers of a host."""
    sent = sharded_bytes(touched.by_worker, row_bytes, cluster.num_workers)
    rows = cluster.workers_per_host * touched.by_worker
    if merges:
        rows = touched.by(cluster.workers_per_host)
    link = sharded_bytes(rows, row_bytes, cluster.num_hosts)
    others = cluster.num_workers - 1
    return Traffic(sent, link, 4 if others else 0, 4 * others)


def gathered(touched: Touched, row_bytes: float, cluster: Cluster) -> Traffic:
    """A table whose touched rows all workers send to all, as DDP's sparse gradients."""
    others = cluster.num_workers - 1
    sent = others * touched.by_worker * (row_bytes + SPARSE_ID_BYTES)
    return Traffic(sent, sent if cluster.num_hosts > 1 else 0.0, others, others)


def served(size_bytes: float, cluster: Cluster, *, merges: bool = False) -> Traffic:
    """A dense parameter that is kept by owners: each worker pulls it and pushes its gradient."""
    sent = allreduce_bytes(size_bytes, cluster.num_workers)
    pushers = 1 if merges else cluster.workers_per_host
    copies = cluster.workers_per_host + pushers
    link = copies * allreduce_bytes(size_bytes, cluster.num_hosts) / 2
    others = cluster.num_workers - 1
    return Traffic(sent, link, 2 if others else 0, 2 * others)
