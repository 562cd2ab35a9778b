"""Predict the time of a step from what it touches and computes. Pure functions.

Links carry one message after the other, so no step is shorter than all its traffic. How much of the
traffic overlaps with compute depends on when it can begin:

    rows that come early       overlap with everything; they only count in all traffic
    late rows, row gradients   are waited for
    dense gradients            overlap with backward, once the first bucket is full; the last
                               bucket, which the last gradient completes, is waited for

A step takes max(all traffic, compute + what is waited for) + turns · latency, or the turns of the
ring that sums dense gradients if these take longer. Links that were idle during the compute let
some bytes pass at once, which are not waited for.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from parallax.observability.ledger import Record
from parallax.planning import cost
from parallax.planning.cost import Cluster, Touched, Traffic

_BUCKET_BYTES = (1 << 20, 25 << 20)
"""Of torch's reducer, if nobody sets them: the first one, the others."""
_BACKWARD_SHARE = 2 / 3
"""Of the compute, if nobody clocked it: a backward multiplies twice where a forward does once."""


class Architecture(str, enum.Enum):
    """How all parameters of a job are kept the same."""

    ALL_REDUCE = "all-reduce only"
    """Copies on all workers; rows of tables are gathered, as DDP and Horovod do."""
    SHARDED = "sharded only"
    """Owners keep all parameters, dense ones too."""
    HYBRID = "hybrid"
    """Each parameter the way that moves the fewest bytes."""


@dataclass(frozen=True)
class Table:
    """What a step does with a table."""

    name: str
    size_bytes: float
    row_bytes: float
    """As it travels."""
    touched: Touched
    early_share: float = 0.0
    """Of the pulled rows: those that come beside the compute."""
    exact_row_bytes: float | None = None
    """As it is, if it travels in fewer bits."""


@dataclass(frozen=True)
class Work:
    """A worker's step."""

    tables: tuple[Table, ...]
    dense_bytes: float
    compute_seconds: float
    """Without any waiting."""
    samples: float
    """Of a worker, in whatever the throughput is told in."""
    bucket_bytes: float | None = None
    """Dense gradients that are all-reduced together, where torch's own sizes are not taken."""
    reductions: float = 1.0
    """In a step; dense gradients and rows are those of all of them."""
    backward_seconds: float | None = None
    """From the first gradient to the last; None if it is not known."""

    @property
    def last_share(self) -> float:
        """Of the dense gradients: what is in their last bucket."""
        first, others = self._buckets
        rest = self.dense_bytes - first
        last = self.dense_bytes if rest <= 0 else rest % others or others
        return last / self.dense_bytes if self.dense_bytes else 0.0

    @property
    def window_seconds(self) -> float:
        """Of the backward: what is left when the first bucket is full."""
        first_share = min(1.0, self._buckets[0] / self.dense_bytes) if self.dense_bytes else 1.0
        backward = self.backward_seconds
        if backward is None:
            backward = _BACKWARD_SHARE * self.compute_seconds
        return backward * (1 - first_share)

    @property
    def _buckets(self) -> tuple[float, float]:
        """The first one's size, and that of the others."""
        return _BUCKET_BYTES if self.bucket_bytes is None else (self.bucket_bytes,) * 2


@dataclass(frozen=True)
class Forecast:
    """A step as it should be."""

    traffic: Traffic
    seconds: float
    throughput: float
    """Samples a second of all workers."""


def forecast(
    work: Work, cluster: Cluster, architecture: Architecture, *, merges: bool = True
) -> Forecast:
    """`merges`: rows cross a host's link once for all its workers."""
    early, waited, whole_bytes = Traffic(), Traffic(), work.dense_bytes
    for table in work.tables:
        if architecture is Architecture.ALL_REDUCE:
            exact = table.exact_row_bytes or table.row_bytes
            waited = waited.beside(cost.gathered(table.touched, exact, cluster))
        elif architecture is Architecture.HYBRID and _is_better_whole(table, work, cluster, merges):
            whole_bytes += table.size_bytes * work.reductions
        else:
            comes_early, rest = _sharded(table, cluster, merges)
            early, waited = early + comes_early, waited + rest
    dense = cost.all_reduced(whole_bytes, cluster, work.reductions)
    if architecture is Architecture.SHARDED:
        dense = cost.served(whole_bytes, cluster, merges=merges)
    return _joined(replace(work, dense_bytes=whole_bytes), cluster, dense, early, waited)


def planned(work: Work, cluster: Cluster, *, merges: bool = False) -> Forecast:
    """With every table sharded, as the plan has it; what it has whole is dense."""
    early, waited = Traffic(), Traffic()
    for table in work.tables:
        comes_early, rest = _sharded(table, cluster, merges)
        early, waited = early + comes_early, waited + rest
    dense = cost.all_reduced(work.dense_bytes, cluster, work.reductions)
    return _joined(work, cluster, dense, early, waited)


class Line(Protocol):
    """What a forecast needs of a plan's line."""

    @property
    def name(self) -> str: ...
    @property
    def route(self) -> str: ...
    @property
    def size_bytes(self) -> float: ...
    @property
    def row_bytes(self) -> float: ...
    @property
    def exact_row_bytes(self) -> float: ...


def work_of(
    lines: Iterable[Line], mean: Record, num_workers: int, bucket_bytes: float | None
) -> Work:
    """The step that was seen, under a plan with these lines."""
    tables, dense_bytes, reductions = [], 0.0, mean.reductions or 1.0
    for line in lines:
        entry = mean.parameters.get(line.name)
        if line.route == "all-reduce" and entry is not None:
            dense_bytes += line.size_bytes * reductions
        elif line.route == "sharded" and entry is not None and entry.asked_rows:
            touched = Touched.seen(entry.rows, entry.updated_rows, num_workers)
            early = entry.early_rows / entry.asked_rows
            sizes = (line.size_bytes, line.row_bytes)
            tables.append(Table(line.name, *sizes, touched, early, line.exact_row_bytes))
    compute = max(mean.seconds - mean.waiting_seconds, 0.0)
    samples = mean.samples or 1.0
    backward = min(mean.backward_seconds, compute) or None
    return Work(tuple(tables), dense_bytes, compute, samples, bucket_bytes, reductions, backward)


def _joined(
    work: Work, cluster: Cluster, dense: Traffic, early: Traffic, waited: Traffic
) -> Forecast:
    """A step of which some traffic comes early and some is waited for, beside dense gradients."""
    traffic = dense.beside(early + waited)
    dense_seconds = dense.wire_seconds(cluster)
    hidden = min(dense_seconds * (1 - work.last_share), work.window_seconds)
    head_start = cluster.head_start(work.compute_seconds - hidden - early.wire_seconds(cluster))
    seen = dense_seconds - hidden + waited.wire_seconds(cluster)
    after = dense.beside(waited)
    seen -= after.wire_seconds(cluster) - after.wire_seconds(cluster, head_start)
    seconds = max(traffic.wire_seconds(cluster), work.compute_seconds + max(seen, 0.0))
    seconds += max(waited.turns * cluster.latency_seconds, _turning(work, cluster, dense))
    return Forecast(traffic, seconds, work.samples * cluster.num_workers / seconds)


def _turning(work: Work, cluster: Cluster, dense: Traffic) -> float:
    """What the turns of the last dense gradients take."""
    if cluster.ring_seconds is not None and dense.turns > 2:  # Only a ring has more.
        return dense.turns * cluster.ring_seconds
    # A latency is that of a turn in which all take part; a ring's take less, most of all where the
    # last bucket is small. Then its turns count as if it were sent directly.
    last = cost.all_reduced(work.dense_bytes * work.last_share, cluster, work.reductions)
    return min(dense.turns, last.turns) * cluster.latency_seconds


def _is_better_whole(table: Table, work: Work, cluster: Cluster, merges: bool) -> bool:
    whole = cost.all_reduced(table.size_bytes * work.reductions, cluster)
    rows = cost.sharded(table.touched, table.row_bytes, cluster, merges=merges)
    return whole.limiting_bytes(cluster) < rows.limiting_bytes(cluster)


def _sharded(table: Table, cluster: Cluster, merges: bool) -> tuple[Traffic, Traffic]:
    rows = cost.sharded(table.touched, table.row_bytes, cluster, merges=merges)
    early = table.early_share / 2  # Pulls are one half of it.
    return replace(rows * early, turns=0), rows * (1 - early)


def scaling(
    work: Work, cluster: Cluster, num_hosts: Sequence[int], *, merges: bool = True
) -> dict[Architecture, list[Forecast]]:
    """For each architecture and number of hosts."""
    return {
        architecture: [
            forecast(work, cluster.with_hosts(each), architecture, merges=merges)
            for each in num_hosts
        ]
        for architecture in Architecture
    }
