"""(what a step touches and computes, cluster, architecture) → its time. Pure functions.

Some traffic goes beside the compute and is seen only where it takes longer: all-reduces beside the
backward, rows that come early beside everything. The rest is waited for: late rows before the
forward, row gradients after the backward. So a step takes

    max(compute, hidden) + exposed + turns · latency

with the wire's seconds of both kinds of traffic.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from parallax import cost
from parallax.cost import Cluster, Touched, Traffic
from parallax.ledger import Entry, Record


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
    touched: Touched
    early_share: float = 0.0
    """Of the pulled rows: those that come beside the compute."""


@dataclass(frozen=True)
class Work:
    """A worker's step."""

    tables: tuple[Table, ...]
    dense_bytes: float
    compute_seconds: float
    """Without any waiting."""
    samples: float
    """Of a worker, in whatever the throughput is told in."""


@dataclass(frozen=True)
class Forecast:
    """A step as it should be."""

    hidden: Traffic
    exposed: Traffic
    seconds: float
    throughput: float
    """Samples a second of all workers."""

    @property
    def traffic(self) -> Traffic:
        return self.hidden + self.exposed


def forecast(
    work: Work, cluster: Cluster, architecture: Architecture, *, merges: bool = True
) -> Forecast:
    """`merges`: rows cross a host's link once for all its workers."""
    exposed = Traffic()
    if architecture is Architecture.SHARDED:
        hidden = cost.served(work.dense_bytes, cluster, merges=merges)
    else:
        hidden = cost.all_reduced(work.dense_bytes, cluster)
    for table in work.tables:
        hides, shows = _table(table, cluster, architecture, merges)
        hidden, exposed = hidden + hides, exposed + shows
    return _joined(work, cluster, hidden, exposed)


def planned(work: Work, cluster: Cluster, *, merges: bool = False) -> Forecast:
    """With every table sharded, as the plan has it; what it has whole is dense."""
    hidden, exposed = cost.all_reduced(work.dense_bytes, cluster), Traffic()
    for table in work.tables:
        hides, shows = _sharded(table, cluster, merges)
        hidden, exposed = hidden + hides, exposed + shows
    return _joined(work, cluster, hidden, exposed)


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


def work_of(lines: Iterable[Line], mean: Record, num_workers: int) -> Work:
    """The step that was seen, under a plan with these lines."""
    tables, dense_bytes = [], 0.0
    for line in lines:
        entry = mean.parameters.get(line.name)
        if line.route == "all-reduce" and entry is not None:
            dense_bytes += line.size_bytes
        elif line.route == "sharded" and entry is not None and entry.rows:
            touched = Touched(entry.rows, _growth(entry, num_workers))
            early = entry.early_rows / entry.rows
            tables.append(Table(line.name, line.size_bytes, line.row_bytes, touched, early))
    compute = max(mean.seconds - mean.waiting_seconds, 0.0)
    return Work(tuple(tables), dense_bytes, compute, mean.samples or 1.0)


def _growth(entry: Entry, num_workers: int) -> float:
    """Owners are spread evenly: what one updates tells what all workers touch together."""
    if num_workers == 1 or not entry.updated_rows:
        return 1.0
    union = entry.updated_rows * num_workers
    return min(max(math.log(union / entry.rows) / math.log(num_workers), 0.0), 1.0)


def _joined(work: Work, cluster: Cluster, hidden: Traffic, exposed: Traffic) -> Forecast:
    latency = cluster.between if cluster.num_hosts > 1 else cluster.within
    seconds = (
        max(work.compute_seconds, hidden.wire_seconds(cluster))
        + exposed.wire_seconds(cluster)
        + exposed.turns * latency.latency_seconds
    )
    return Forecast(hidden, exposed, seconds, work.samples * cluster.num_workers / seconds)


def _table(
    table: Table, cluster: Cluster, architecture: Architecture, merges: bool
) -> tuple[Traffic, Traffic]:
    """What of a table's traffic is hidden, and what is not."""
    if architecture is Architecture.ALL_REDUCE:
        return Traffic(), cost.gathered(table.touched, table.row_bytes, cluster)
    rows = cost.sharded(table.touched, table.row_bytes, cluster, merges=merges)
    whole = cost.all_reduced(table.size_bytes, cluster)
    if architecture is Architecture.HYBRID and is_less(whole, rows, cluster):
        return whole, Traffic()
    return _sharded(table, cluster, merges)


def _sharded(table: Table, cluster: Cluster, merges: bool) -> tuple[Traffic, Traffic]:
    rows = cost.sharded(table.touched, table.row_bytes, cluster, merges=merges)
    early = table.early_share / 2  # Pulls are one half of it.
    return replace(rows * early, turns=0), rows * (1 - early)


def is_less(one: Traffic, other: Traffic, cluster: Cluster) -> bool:
    """Whether one moves less over what limits this cluster: links, or a host's memory."""
    if cluster.num_hosts > 1:
        return one.link_bytes < other.link_bytes
    return one.worker_bytes < other.worker_bytes


def scaling(
    work: Work, cluster: Cluster, num_hosts: Sequence[int], *, merges: bool = True
) -> dict[Architecture, list[Forecast]]:
    """For each architecture and number of hosts."""
    return {
        architecture: [
            forecast(work, replace(cluster, num_hosts=each), architecture, merges=merges)
            for each in num_hosts
        ]
        for architecture in Architecture
    }
