"""Choose routes again from the rows that steps have touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from parallax.comm.peers import Peers
from parallax.planning.changes import Change, MoveTable, Notice
from parallax.planning.cost import Cluster, Touched
from parallax.planning.memory import free_bytes
from parallax.planning.plan import Plan, Route
from parallax.planning.planner import better_route

_COPIES = 5
"""Memory of a dense table, in multiples of its size: values, gradient, bucket, and two states of
the optimizer."""


class RoutedTable(Protocol):
    """A table, as far as its route is concerned."""

    name: str
    parameter: nn.Parameter

    @property
    def shard(self) -> Tensor | None:
        """This owner's rows; None where every worker has all rows."""


class TouchedRows:
    """Counts the rows that steps touch, and finds the route that moves fewer bytes."""

    def __init__(self, peers: Peers, shape: Cluster) -> None:
        self._peers = peers
        self._shape = shape
        """The number of hosts and workers; its rates are not used."""
        self._counted: dict[str, tuple[float, float]] = {}
        """By table: the ledger's rows, touched and updated, at the last count."""
        self._growth: dict[str, float] = {}
        """By table: how the number of distinct rows grows with the number of workers."""
        self._too_large: set[str] = set()
        """Tables that were reported to need too much memory as dense parameters."""

    def better_routes(
        self,
        plan: Plan,
        tables: Mapping[str, RoutedTable],
        num_reductions: int,
        *,
        merges: bool,
    ) -> list[Change]:
        """Return the tables that should move. Collective.

        There were `num_reductions` reductions since the last call. A table stays sharded where a
        worker has too little memory for all of its rows.
        """
        touched, free = self._touched(tables, num_reductions)
        changes: list[Change] = []
        for name, rows in touched.items():
            line = plan[name]
            better = better_route(line, rows, self._shape, merges=merges)
            if better is None:
                continue
            route, why = better
            needed = _COPIES * line.size_bytes if route is Route.ALL_REDUCE else 0
            if needed <= free:
                free -= needed
                changes.append(MoveTable(name, route, why))
            elif name not in self._too_large:
                self._too_large.add(name)
                changes.append(Notice(f"{name!r} stays sharded, for want of memory: {why}"))
        return changes

    def _touched(
        self, tables: Mapping[str, RoutedTable], num_reductions: int
    ) -> tuple[dict[str, Touched], float]:
        """Return the mean number of rows of a reduction, for each table where it is known, and the
        free memory of the worker that has least. Collective."""
        counts = [self._count(table) for table in tables.values()]
        device = next(iter(tables.values())).parameter.device
        free = free_bytes(device, self._shape.workers_per_host)
        mine = torch.tensor([*counts, (free, 0.0)], dtype=torch.float64)
        where = f"looking at what steps touch in step {self._peers.step}"
        gathered = torch.stack(self._peers.gather(mine, where))
        num_workers, found = self._peers.num_workers, {}
        for i, (name, table) in enumerate(tables.items()):
            rows, updated = gathered[:, i].mean(0).tolist()
            if table.shard is None:
                growth = self._growth.get(name, 1.0)
                found[name] = Touched(updated / num_workers**growth, growth)
            elif rows:
                self._growth[name] = Touched.seen(rows, updated, num_workers).growth
                found[name] = Touched(rows / num_reductions, self._growth[name])
        known = {name: rows for name, rows in found.items() if math.isfinite(rows.by_worker)}
        return known, float(gathered[:, -1, 0].min())

    def _count(self, table: RoutedTable) -> tuple[float, float]:
        """Return the rows that were touched and updated here since the last count. For a dense
        table: 0, and the rows with a gradient in the last step."""
        if table.shard is None:
            return 0.0, _rows_with_gradient(table.parameter.grad)
        total = self._peers.ledger.totals.get(table.name)
        now = (0.0, 0.0) if total is None else (total.rows, total.updated_rows)
        before = self._counted.get(table.name, (0.0, 0.0))
        self._counted[table.name] = now
        return now[0] - before[0], now[1] - before[1]


def _rows_with_gradient(gradient: Tensor | None) -> float:
    if gradient is None:
        return math.nan
    return float((gradient.reshape(len(gradient), -1) != 0).any(1).sum())
