"""Tables move to the route that moves fewer bytes, as the steps show what they touch.

Every worker hears the same counts and decides alike. A table that is nearly dense, or tiny, becomes
an ordinary parameter; one that was and is touched less becomes a table again. Rows and the
optimizer's state move with it between two steps, so the result stays exact. Workers of a host that
hardly want the same rows stop asking together. Links that seem to have changed are measured again;
when workers have, the number of parts is looked for anew.
A table stays sharded where a worker has no memory for the whole of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from parallax.comm.host_merge import HostMerge
from parallax.comm.peers import Peers
from parallax.cost import ID_BYTES, Cluster, Touched
from parallax.drift import Drift, Pace, of_links
from parallax.hosts import Hosts
from parallax.ledger import Entry
from parallax.memory import free_bytes
from parallax.plan import Plan, Route
from parallax.planner import better_alone, better_route

_FIRST_STEPS, _MAX_STEPS = 5, 100
"""Looked at after the first few steps, then after four times as many, at last every hundred."""
_MEASURE_SECONDS, _PACED_STEPS = 200.0, 2000
"""At least, from one measurement of links to the next, which may take 2 s each; and both, from one
search for the number of parts to the next: steps of a busy machine are never alike for long."""
_COPIES = 5
"""Of a table that is whole: its values, a gradient and a bucket of it, and two of most state."""


class RoutedTable(Protocol):
    """A table as far as its route is concerned."""

    name: str
    parameter: nn.Parameter

    @property
    def shard(self) -> Tensor | None:
        """This owner's rows; None where every worker has all."""


@dataclass(frozen=True)
class Decisions:
    """What the session does when a plan changes; each on all workers together."""

    move: Callable[[RoutedTable, Route, str], None]
    merge: Callable[[bool, str], None]
    """Have the workers of a host ask together, or each for itself; why."""
    tell: Callable[[str], None]
    """Something has changed that decides nothing by itself."""
    measure: Callable[[], Cluster | None]
    """Measure the links."""
    adopt: Callable[[Cluster], None]
    """Count with these links from now on."""
    repace: Callable[[], None]
    """Workers are not as fast as they were: look again for what depends on it."""
    is_settled: Callable[[], bool]
    """Whether steps are alike, and no trials are made."""


class Replanner:
    """Looks at the tables that may move now and then, and at what was measured."""

    def __init__(
        self,
        peers: Peers,
        tables: Mapping[str, RoutedTable],
        host_merge: HostMerge,
        plan: Callable[[], Plan],
        decisions: Decisions,
        hosts: Hosts,
        *,
        may_separate: bool,
    ) -> None:
        self._peers = peers
        self._tables = tables
        """Those that may move."""
        self._plan = plan
        self._host_merge = host_merge
        self._decisions = decisions
        self._shape = Cluster.unmeasured(len(hosts), max(map(len, hosts.workers)))
        self._may_separate = may_separate
        self.cluster: Cluster | None = None
        """The links, if they are known; the same on all workers."""
        self._num_steps = 0
        self._reductions = 0
        self._too_large: set[str] = set()
        self._seconds = math.inf
        """Of steps since links were measured again."""
        self._paced_seconds, self._paced_steps = math.inf, math.inf
        """… since what depends on the workers' speed was looked for."""
        self._is_paced = True
        """Whether that was after it had last changed."""
        self._next = _FIRST_STEPS
        self._seen: dict[str, tuple[float, float]] = {}
        self._growth: dict[str, float] = {}
        self._shared: dict[str, Tensor] = {}
        self._asked: tuple[float, float, float] | None = None
        """What was wanted and asked for when workers of a host last asked together."""
        self._drift = Drift()

    def end_step(self, reductions: int) -> None:
        """All optimizers have stepped since the last time, on all workers; gradients came together
        so often so far."""
        self._num_steps += 1
        if self._peers.num_workers == 1 or self._num_steps < self._next:
            return
        steps, self._num_steps = self._num_steps, 0
        times, self._reductions = reductions - self._reductions, reductions
        is_first, is_together = self._next == _FIRST_STEPS, self._host_merge.is_on
        self._next = min(4 * self._next, _MAX_STEPS)
        if self._decisions.is_settled() and not is_first:  # The first steps are like no others.
            self._look_for_drift(steps)
        else:
            self._drift = Drift()
        if self._tables and times:
            self._move_tables(times)
        moved = self._moved()
        if is_together and self._may_separate:
            self._look_at_neighbours(moved / steps)

    def _look_for_drift(self, num_steps: int) -> None:
        """See [Note: drift]."""
        mine = Pace.of(list(self._peers.ledger.records)[-num_steps:])
        told = self._peers.gather(
            torch.tensor(astuple(mine), dtype=torch.float64),
            f"telling how fast steps are in step {self._peers.step}",
        )
        paces = [Pace(*each.tolist()) for each in told]
        passed = num_steps * max(pace.seconds for pace in paces)
        self._seconds += passed
        self._paced_seconds += passed
        self._paced_steps += num_steps
        for what in self._drift.of_workers(paces):
            self._decisions.tell(what)
            self._is_paced = False
        self._follow_pace()
        if self.cluster is None or self._seconds < _MEASURE_SECONDS:
            return
        if self._drift.of_waits(paces):
            self._seconds = 0.0
            self._measure_links(self.cluster)

    def _follow_pace(self) -> None:
        is_soon = self._paced_seconds < _MEASURE_SECONDS or self._paced_steps < _PACED_STEPS
        if not self._is_paced and not is_soon:
            self._is_paced, self._paced_seconds, self._paced_steps = True, 0.0, 0
            self._decisions.repace()

    def _measure_links(self, known: Cluster) -> None:
        now = self._decisions.measure()
        change = None if now is None else of_links(known, now)
        if now is None or change is None:
            return
        self.cluster = now
        self._decisions.tell(change)
        self._decisions.adopt(now)
        if self._asked is None or self._host_merge.is_on:
            return
        if better_alone(*self._asked, now) is None:
            self._decisions.merge(True, change)

    def _move_tables(self, num_times: int) -> None:
        merges = self._host_merge.is_on
        found, free = self._touched(num_times)
        for name, touched in found.items():
            line = self._plan()[name]
            better = better_route(line, touched, self._shape, merges=merges)
            if better is None:
                continue
            needed = _COPIES * line.size_bytes if better[0] is Route.ALL_REDUCE else 0
            if needed > free:  # It may have been sharded for just that.
                self._tell_of_memory(name, better[1])
                continue
            free -= needed
            self._decisions.move(self._tables[name], *better)

    def _tell_of_memory(self, name: str, why: str) -> None:
        if name not in self._too_large:
            self._too_large.add(name)
            self._decisions.tell(f"{name!r} stays sharded, for want of memory: {why}")

    def _look_at_neighbours(self, moved: Tensor) -> None:
        where = f"looking at what hosts share in step {self._peers.step}"
        told = torch.stack(self._peers.gather(moved, where)).mean(0)
        wanted, exact, asked = told.tolist()
        self._asked = (wanted, exact, asked)
        why = better_alone(wanted, exact, asked, self.cluster)
        if why is not None:
            self._decisions.merge(False, why)

    def _moved(self) -> Tensor:
        """Bytes since the last time: wanted here, as they travel and as they are; asked for."""
        moved = torch.zeros(3, dtype=torch.float64)
        for line in self._plan().parameters:
            total = self._peers.ledger.totals.get(line.name, Entry())
            now = torch.tensor([total.rows, total.rows, total.asked_rows], dtype=torch.float64)
            rows = now - self._shared.get(line.name, torch.zeros_like(now))
            self._shared[line.name] = now
            if line.route is Route.SHARDED:
                sizes = [line.row_bytes, line.exact_row_bytes, line.row_bytes]
                moved += 2 * rows * (torch.tensor(sizes, dtype=torch.float64) + ID_BYTES)
        return moved

    def _touched(self, num_times: int) -> tuple[dict[str, Touched], float]:
        """Rows whose gradients come together at a time, on average, of the tables of which it is
        known; and the memory that is left to the worker that has least of it."""
        counts = [self._counts(table) for table in self._tables.values()]
        device = next(iter(self._tables.values())).parameter.device
        free = free_bytes(device, self._shape.workers_per_host)
        mine = torch.tensor([*counts, (free, 0.0)], dtype=torch.float64)
        where = f"looking at what steps touch in step {self._peers.step}"
        told = torch.stack(self._peers.gather(mine, where))
        num_workers, found = self._peers.num_workers, {}
        for i, (name, table) in enumerate(self._tables.items()):
            rows, updated = told[:, i].mean(0).tolist()
            if table.shard is None:
                growth = self._growth.get(name, 1.0)
                found[name] = Touched(updated / num_workers**growth, growth)
            elif rows:
                self._growth[name] = Touched.seen(rows, updated, num_workers).growth
                found[name] = Touched(rows / num_times, self._growth[name])
        known = {name: rows for name, rows in found.items() if math.isfinite(rows.by_worker)}
        return known, float(told[:, -1, 0].min())

    def _counts(self, table: RoutedTable) -> tuple[float, float]:
        """Rows touched here since the last time, and updated here; of one that is whole, the rows
        with a gradient in the last step."""
        if table.shard is None:
            return 0.0, _rows_with_gradient(table.parameter.grad)
        total = self._peers.ledger.totals.get(table.name)
        now = (0.0, 0.0) if total is None else (total.rows, total.updated_rows)
        before = self._seen.get(table.name, (0.0, 0.0))
        self._seen[table.name] = now
        return now[0] - before[0], now[1] - before[1]


def _rows_with_gradient(gradient: Tensor | None) -> float:
    if gradient is None:
        return math.nan
    return float((gradient.reshape(len(gradient), -1) != 0).any(1).sum())
