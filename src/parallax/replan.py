"""Tables move to the route that moves fewer bytes, as the steps show what they touch.

Every worker hears the same counts and decides alike. A table that is nearly dense, or tiny, becomes
an ordinary parameter; one that was and is touched less becomes a table again. Rows and the
optimizer's state move with it between two steps, so the result stays exact. Workers of a host that
hardly want the same rows stop asking together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from parallax.cost import ID_BYTES, Cluster, Touched
from parallax.exchange.neighbours import Neighbours
from parallax.exchange.peers import Peers
from parallax.ledger import Entry
from parallax.plan import Plan, Route
from parallax.planner import better_alone, better_route
from parallax.sparse import TableRows

_FIRST_STEPS, _MAX_STEPS = 5, 100
"""Looked at after the first few steps, then after four times as many, at last every hundred."""


class Replanner:
    """Looks at the tables that may move now and then."""

    def __init__(
        self,
        peers: Peers,
        tables: Mapping[str, TableRows],
        neighbours: Neighbours,
        plan: Callable[[], Plan],
        move: Callable[[TableRows, Route, str], None],
        separate: Callable[[str], None],
        *,
        may_separate: bool,
    ) -> None:
        self._peers = peers
        self._tables = tables
        """Those that may move."""
        self._plan = plan
        self._neighbours = neighbours
        self._move = move
        self._separate = separate
        """Have the workers of a host ask for themselves, for this reason."""
        self._may_separate = may_separate
        self.cluster: Cluster | None = None
        """The links, if they are known; the same on all workers."""
        self._num_steps = 0
        self._next = _FIRST_STEPS
        self._seen: dict[str, tuple[float, float]] = {}
        self._growth: dict[str, float] = {}
        self._shared: dict[str, Tensor] = {}

    def end_step(self) -> None:
        """All optimizers have stepped, on all workers."""
        self._num_steps += 1
        if self._peers.num_workers == 1 or self._num_steps < self._next:
            return
        steps, self._num_steps = self._num_steps, 0
        self._next = min(4 * self._next, _MAX_STEPS)
        if self._tables:
            self._move_tables(steps)
        if self._neighbours.is_on and self._may_separate:
            self._look_at_neighbours(steps)

    def _move_tables(self, num_steps: int) -> None:
        for name, rows in self._touched(num_steps).items():
            better = better_route(self._plan()[name], rows, self._peers.num_workers)
            if better is not None:
                self._move(self._tables[name], *better)

    def _look_at_neighbours(self, num_steps: int) -> None:
        where = f"looking at what hosts share in step {self._peers.step}"
        told = torch.stack(self._peers.gather(self._moved(), where)).mean(0) / num_steps
        wanted, exact, asked = told.tolist()
        why = better_alone(wanted, exact, asked, self.cluster)
        if why is not None:
            self._separate(why)

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

    def _touched(self, num_steps: int) -> dict[str, float]:
        """Rows that a worker touches a step, on average, of the tables of which it is known."""
        counts = [self._counts(table) for table in self._tables.values()]
        mine = torch.tensor(counts, dtype=torch.float64)
        where = f"looking at what steps touch in step {self._peers.step}"
        told = torch.stack(self._peers.gather(mine, where))
        found = {}
        for i, (name, table) in enumerate(self._tables.items()):
            rows, updated = told[:, i].mean(0).tolist()
            if table.shard is None:
                found[name] = updated / self._peers.num_workers ** self._growth.get(name, 1.0)
            elif rows:
                found[name] = rows / num_steps
                self._growth[name] = Touched.seen(rows, updated, self._peers.num_workers).growth
        return {name: rows for name, rows in found.items() if math.isfinite(rows)}

    def _counts(self, table: TableRows) -> tuple[float, float]:
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
