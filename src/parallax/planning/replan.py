"""Re-plan: decide from time to time, between two steps, what should change.

Every worker gathers the same numbers and makes the same decisions:

- A table that is nearly dense, or tiny, becomes dense. One that is touched less is sharded again.
  Rows and the optimizer's state move with it, so the result stays exact.
- Workers of a host that share few rows stop pulling together.
- Links whose speed seems to have changed are measured again. If the speed of workers has changed,
  the number of partitions is tuned again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from parallax.cluster.topology import Hosts
from parallax.comm.peers import Peers
from parallax.planning.changes import Change, MergeHosts, MoveTable, UseLinks
from parallax.planning.cost import Cluster
from parallax.planning.host_merging import HostMerging
from parallax.planning.plan import Plan
from parallax.planning.speed import SpeedMonitor
from parallax.planning.touched_rows import RoutedTable, TouchedRows

_FIRST_STEPS, _MAX_STEPS = 5, 100
"""Re-plan after the first few steps, then after four times as many, finally every hundred."""


class Replanner:
    """Decides when to check the plan, and combines the checks."""

    def __init__(
        self,
        peers: Peers,
        hosts: Hosts,
        device: torch.device,
        movable: Iterable[str],
        *,
        may_separate: bool,
    ) -> None:
        """`movable`: tables whose route may change. `may_separate`: host merging may be switched
        off."""
        self._peers = peers
        self._movable = set(movable)
        self._may_separate = may_separate
        self._speed = SpeedMonitor(peers, hosts, device)
        self._merging = HostMerging(peers)
        shape = Cluster.unmeasured(len(hosts), max(map(len, hosts.workers)))
        self._touched = TouchedRows(peers, shape)
        self._num_steps = 0
        """Steps since the last check."""
        self._num_reductions = 0
        """Reductions until the last check."""
        self._interval_steps = _FIRST_STEPS

    def hold(self, name: str) -> None:
        """Never move this table again."""
        self._movable.discard(name)

    def after_step(
        self,
        plan: Plan,
        cluster: Cluster | None,
        tables: Mapping[str, RoutedTable],
        num_reductions: int,
        *,
        is_tuning: bool,
    ) -> list[Change]:
        """Return what should change after this step, in this order. Collective.

        `num_reductions` counts from the start of training. `is_tuning`: steps differ because
        numbers of partitions are on trial, so their speed says nothing.
        """
        self._num_steps += 1
        if self._peers.num_workers == 1 or self._num_steps < self._interval_steps:
            return []
        num_steps, self._num_steps = self._num_steps, 0
        new_reductions = num_reductions - self._num_reductions
        self._num_reductions = num_reductions
        is_first = self._interval_steps == _FIRST_STEPS
        self._interval_steps = min(4 * self._interval_steps, _MAX_STEPS)
        changes: list[Change] = []
        if is_tuning or is_first:  # The first steps are slower than others.
            self._speed.reset()
        else:
            changes = self._check_speed(plan, cluster, num_steps)
        changes += self._check_routes(plan, tables, new_reductions, changes)
        return changes + self._check_merging(plan, cluster, num_steps, changes)

    def _check_speed(self, plan: Plan, cluster: Cluster | None, num_steps: int) -> list[Change]:
        changes = self._speed.check(num_steps, cluster)
        links = _new_links(changes)
        if links is not None and plan.num_hosts is None:
            changes += self._merging.switch_on(links.cluster, links.why)
        return changes

    def _check_routes(
        self,
        plan: Plan,
        tables: Mapping[str, RoutedTable],
        new_reductions: int,
        decided: Sequence[Change],
    ) -> list[Change]:
        movable = {name: table for name, table in tables.items() if name in self._movable}
        if not movable or not new_reductions:
            return []
        merges = plan.num_hosts is not None or any(isinstance(c, MergeHosts) for c in decided)
        return self._touched.better_routes(plan, movable, new_reductions, merges=merges)

    def _check_merging(
        self, plan: Plan, cluster: Cluster | None, num_steps: int, decided: Sequence[Change]
    ) -> list[Change]:
        routes = {change.name: change.route for change in decided if isinstance(change, MoveTable)}
        moved_bytes = self._merging.count(plan, routes)
        if plan.num_hosts is None or not self._may_separate:
            return []
        links = _new_links(decided)
        now = cluster if links is None else links.cluster
        return self._merging.switch_off(moved_bytes / num_steps, now)


def _new_links(changes: Sequence[Change]) -> UseLinks | None:
    return next((change for change in changes if isinstance(change, UseLinks)), None)
