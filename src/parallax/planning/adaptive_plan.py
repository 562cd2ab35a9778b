"""The plan while training runs: its current state, and how it changes between two steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from parallax.cluster.environment import link_rate
from parallax.cluster.topology import Hosts
from parallax.comm.host_merge import HostMerge
from parallax.comm.peers import Peers
from parallax.config import Config
from parallax.observability.run_log import RunLog
from parallax.planning import links
from parallax.planning.changes import (
    Change,
    MergeHosts,
    MoveTable,
    Notice,
    TunePartitions,
    UseLinks,
)
from parallax.planning.plan import Plan, Route, RowRule
from parallax.planning.replan import Replanner
from parallax.planning.touched_rows import RoutedTable
from parallax.planning.tuner import Tuned, Tuner

_log = logging.getLogger("parallax")
_RECENT_STEPS = 50
"""Steps over which the plan shows means."""


class AdaptivePlan:
    """The plan in force. All workers change it in the same way, between two steps.

    It changes host merging and the number of partitions by itself. Tables are moved by the caller:
    `after_step` returns which ones, and `set_route` records that one was moved.
    """

    def __init__(
        self,
        plan: Plan,
        config: Config,
        peers: Peers,
        host_merge: HostMerge,
        hosts: Hosts,
        device: torch.device,
        movable: Iterable[str],
    ) -> None:
        """Open the run's folder, if there is one, and measure the links. Collective.

        `movable`: tables whose route may change.
        """
        self._config = config
        self._peers = peers
        self._host_merge = host_merge
        self._hosts = hosts
        self._device = device
        self._has_tables = any(
            line.route in (Route.SHARDED, Route.OBSERVED) for line in plan.parameters
        )
        self._has_new_speed = False
        """The workers' speed has changed since this run began, or an earlier one."""
        self._tuner = Tuner(peers, config.min_partitions)
        self._replanner = Replanner(peers, hosts, device, movable, may_separate=config.replan)
        self._plan = replace(
            plan,
            num_hosts=len(hosts) if host_merge.is_on else None,
            num_partitions=self._tuner.number,
        )
        self._run_log = self._open_run_log()
        self._tune()

    def _open_run_log(self) -> RunLog:
        run_log = RunLog.open(self._config.run_dir, self._peers)
        if run_log.is_on:
            try:
                run_log.start(self._hosts, self._device)
                run_log.set_cluster(
                    links.measure(self._peers, self._hosts, self._device, link_rate())
                )
                run_log.plan(self._plan, 0, "as the model and its optimizers have it")
            except BaseException:
                run_log.close()
                raise
        return run_log

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def observed(self) -> Plan:
        """The plan with the means of recent steps, beside what was predicted."""
        mean = self._peers.ledger.mean(_RECENT_STEPS)
        return self._plan if mean is None else self._plan.observed(mean, self._run_log.cluster)

    @property
    def num_partitions(self) -> int:
        """The number of parts in which gradients of rows are pushed in this step."""
        return self._tuner.number

    def set_route(self, name: str, route: Route, why: str) -> None:
        """Record that a parameter was moved to another route."""
        self._change(self._plan.routed(name, route, why), f"{name!r}: {why}")

    def set_row_rule(self, name: str, rule: RowRule) -> None:
        """Record that an option of its optimizer has changed which rows of a table are updated."""
        why = f"{name!r}: its optimizer changes {rule.value} now"
        self._change(self._plan.ruled(name, rule), why)

    def hold(self, name: str) -> None:
        """Never move this table again."""
        self._replanner.hold(name)

    def end_step(self) -> None:
        """Record a step, which is in the ledger already. Collective when trials of the number of
        partitions begin or end."""
        self._run_log.end_step()
        found = self._tuner.end_step(self._peers.ledger.records[-1].seconds)
        if self._tuner.is_warm:
            found = self._tuner.begin_trials(self._known_partitions())
        if found is not None:
            self._set_partitions(found)

    def after_step(self, tables: Mapping[str, RoutedTable], num_reductions: int) -> list[MoveTable]:
        """Re-plan if it is time, and return the tables that the caller must move. Collective.

        Call it when all optimizers have stepped. `num_reductions` counts from the start.
        """
        changes = self._replanner.after_step(
            self._plan, self._run_log.cluster, tables, num_reductions, is_tuning=self._tuner.is_on
        )
        for change in changes:
            self._apply(change)
        return [change for change in changes if isinstance(change, MoveTable)]

    def close(self) -> None:
        self._run_log.close()

    # Changes ------------------------------------------------------------------------------

    def _apply(self, change: Change) -> None:
        match change:
            case Notice(text):
                self._report(text)
            case TunePartitions():
                self._has_new_speed = True
                self._tune()
            case UseLinks(cluster, why):
                self._report(why)
                self._run_log.set_cluster(cluster)
                self._tune()
            case MergeHosts(is_on, why):
                self._merge(is_on, why)
            case MoveTable():
                self._tune()

    def _change(self, plan: Plan, why: str) -> None:
        self._plan = plan
        self._run_log.plan(plan, self._peers.step, why)

    def _merge(self, is_on: bool, why: str) -> None:
        self._host_merge.switch(is_on)
        self._tune()
        how = "workers of a host ask together" if is_on else "workers ask each for itself"
        num_hosts = len(self._hosts) if is_on else None
        self._change(replace(self._plan, num_hosts=num_hosts), f"{how}: {why}")

    def _report(self, text: str) -> None:
        step = self._peers.step
        self._run_log.note(step, text)
        if self._peers.rank == 0:
            _log.warning("step %d: %s", step, text)

    # Partitions ---------------------------------------------------------------------------

    def _tune(self) -> None:
        """Start a search for the best number of partitions."""
        if self._config.replan and self._has_tables:
            self._tuner.start()

    def _set_partitions(self, found: Tuned) -> None:
        number, seconds = found.number, found.seconds
        if number == self._plan.num_partitions and not seconds:
            return
        took = ", ".join(f"{1e3 * seconds[each]:.1f} ms with {each}" for each in sorted(seconds))
        why = f"gradients of rows in {number} parts: {took or 'as an earlier run found'}"
        self._change(replace(self._plan, num_partitions=number), why)
        if seconds and not self._has_new_speed:  # A new run starts with the speed of before.
            self._run_log.partitions(number, self._setting())

    def _known_partitions(self) -> int | None:
        """Return the number to use without trials, if any. Collective."""
        setting = self._setting()
        if not setting["tables"]:
            return self._tuner.number
        return None if self._has_new_speed else self._run_log.known_partitions(setting)

    def _setting(self) -> dict[str, Any]:
        """Return everything that the best number of partitions depends on, but for the links."""
        lines = self._plan.parameters
        tables = {line.name: list(line.shape) for line in lines if line.route is Route.SHARDED}
        return {
            "workers": [len(ranks) for ranks in self._hosts.workers],
            "together": self._host_merge.is_on,
            "tables": tables,
            "wire": self._config.wire,
            "device": self._device.type,
            "least": self._config.min_partitions,
        }
