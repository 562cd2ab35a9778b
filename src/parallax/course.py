"""The plan while a training runs: what it is now, what changes it, and where that is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from parallax.cluster import link_rate
from parallax.comm import links
from parallax.comm.host_merge import HostMerge
from parallax.comm.peers import Peers
from parallax.config import Config
from parallax.cost import Cluster
from parallax.hosts import Hosts
from parallax.plan import Plan, Route
from parallax.replan import Decisions, Replanner, RoutedTable
from parallax.tuner import Tuner
from parallax.watch import Watch

_log = logging.getLogger("parallax")
_RECENT_STEPS = 50
"""Over which the plan shows what a step takes."""


class Course:
    """Has the plan in force. All workers change it alike, between two steps."""

    def __init__(
        self,
        plan: Plan,
        config: Config,
        peers: Peers,
        host_merge: HostMerge,
        hosts: Hosts,
        device: torch.device,
    ) -> None:
        self._config = config
        self._peers = peers
        self._host_merge = host_merge
        self._hosts = hosts
        self._device = device
        self._tables: Mapping[str, RoutedTable] = {}
        self._movable: dict[str, RoutedTable] = {}
        self._is_paced_anew = False
        """Workers are not as fast as they were when this run began, or an earlier one."""
        self._tuner = Tuner(peers, config.min_partitions, self._kept_partitions, self._tuned)
        self._plan = replace(
            plan,
            num_hosts=len(hosts) if host_merge.is_on else None,
            num_partitions=self._tuner.number,
        )
        self._watch = self._watching()

    def start(
        self,
        tables: Mapping[str, RoutedTable],
        movable: dict[str, RoutedTable],
        move: Callable[[Any, Route, str], None],
    ) -> None:
        """Parameters are on their routes. `move` brings one of the movable ones to another."""
        self._tables = tables
        self._movable = movable
        self._move_table = move
        self._replanner = Replanner(
            self._peers,
            movable,
            self._host_merge,
            lambda: self._plan,
            Decisions(
                self._move,
                self._merge,
                self._tell,
                self._measure,
                self._adopt,
                self._repace,
                lambda: not self._tuner.is_on,
            ),
            self._hosts,
            may_separate=self._config.replan,
        )
        self._replanner.cluster = self._watch.cluster
        self._tune()

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def observed(self) -> Plan:
        """The plan with what newer steps took, beside what they should."""
        mean = self._peers.ledger.mean(_RECENT_STEPS)
        return self._plan if mean is None else self._plan.observed(mean, self._watch.cluster)

    @property
    def num_partitions(self) -> int:
        """In how many parts the gradients of rows go in this step."""
        return self._tuner.number

    def reroute(self, name: str, route: Route, why: str) -> None:
        """A parameter has come to another route."""
        self._change(self._plan.routed(name, route, why), f"{name!r}: {why}")

    def hold(self, name: str) -> None:
        """Never move this table again."""
        self._movable.pop(name, None)

    def end_step(self) -> None:
        """A step is over, and in the ledger."""
        self._watch.end_step()
        self._tuner.end_step(self._peers.ledger.records[-1].seconds)

    def look(self, reductions: int) -> None:
        """All optimizers have stepped since the last time: the plan may change now.

        Gradients came together so often since the beginning.
        """
        self._replanner.end_step(reductions)

    def close(self) -> None:
        self._watch.close()

    # Changes ------------------------------------------------------------------------------

    def _change(self, plan: Plan, why: str) -> None:
        self._plan = plan
        self._watch.plan(plan, self._peers.step, why)

    def _move(self, table: RoutedTable, route: Route, why: str) -> None:
        """The steps have shown that another route moves fewer bytes."""
        self._tune()
        self._move_table(table, route, why)

    def _merge(self, together: bool, why: str) -> None:
        """The steps have shown how much the rows are the same that workers of a host want."""
        self._host_merge.is_on = together
        self._tune()
        how = "workers of a host ask together" if together else "workers ask each for itself"
        num_hosts = len(self._hosts) if together else None
        self._change(replace(self._plan, num_hosts=num_hosts), f"{how}: {why}")

    def _tell(self, what: str) -> None:
        step = self._peers.step
        self._watch.note(step, what)
        if self._peers.rank == 0:
            _log.warning("step %d: %s", step, what)

    # Links --------------------------------------------------------------------------------

    def _watching(self) -> Watch:
        watch = Watch.open(self._config.run_dir, self._peers)
        if watch.is_on:
            try:
                watch.start(self._hosts, self._device)
                watch.cluster = self._measure(link_rate())
                watch.plan(self._plan, 0, "as the model and its optimizers have it")
            except BaseException:
                watch.close()
                raise
        return watch

    def _measure(self, known_rate: float | None = None) -> Cluster | None:
        return links.measure(self._peers, self._hosts, self._device, known_rate)

    def _adopt(self, cluster: Cluster) -> None:
        self._watch.cluster = cluster
        self._tune()

    # Partitions ---------------------------------------------------------------------------

    def _repace(self) -> None:
        self._is_paced_anew = True
        self._tune()

    def _tune(self) -> None:
        """Find in how many parts pushes go best, as they are from now on."""
        if self._config.replan and self._tables:
            self._tuner.start()

    def _tuned(self, times: Mapping[int, float]) -> None:
        number = self._tuner.number
        if number == self._plan.num_partitions and not times:
            return
        took = ", ".join(f"{1e3 * times[each]:.1f} ms with {each}" for each in sorted(times))
        why = f"gradients of rows in {number} parts: {took or 'as an earlier run found'}"
        self._change(replace(self._plan, num_partitions=number), why)
        if times and not self._is_paced_anew:  # A run that begins knows nothing of it.
            self._watch.partitions(number, self._tuned_for())

    def _kept_partitions(self) -> int | None:
        what = self._tuned_for()
        if not what["tables"]:
            return self._tuner.number
        return None if self._is_paced_anew else self._watch.kept_partitions(what)

    def _tuned_for(self) -> dict[str, Any]:
        """What a number of parts is found for."""
        tables = {
            name: list(t.parameter.shape) for name, t in self._tables.items() if t.shard is not None
        }
        return {
            "workers": [len(ranks) for ranks in self._hosts.workers],
            "together": self._host_merge.is_on,
            "tables": tables,
            "wire": self._config.wire,
            "device": self._device.type,
            "least": self._config.min_partitions,
        }
