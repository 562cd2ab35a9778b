"""The log of a run: plans, their changes and the ledger, written to the run's folder."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import torch

from parallax.cluster.topology import Hosts
from parallax.comm.peers import Peers
from parallax.errors import ConfigError
from parallax.observability.journal import Journal
from parallax.planning.cost import Cluster
from parallax.planning.plan import Plan

_FIRST_SECONDS, _MAX_SECONDS, _GROWTH = 1.0, 60.0, 1.2
"""At first a line for the steps of each second, later one for each minute: writing must cost
little, and must not fill the disk in weeks of training."""
_OTHER_RATE = 1.5
"""Links that differ by this factor need another search for the number of partitions."""


class RunLog:
    """Writes events to a journal on worker 0. On other workers, or without a folder, it writes
    nothing."""

    def __init__(self, journal: Journal, peers: Peers, *, is_on: bool) -> None:
        self.is_on = is_on
        """Whether there is a folder; the same on all workers."""
        self.cluster: Cluster | None = None
        """The links between the workers; None where they were not measured."""
        self._journal = journal
        self._peers = peers
        self._ledger = peers.ledger
        self._written = time.monotonic()
        self._num_steps = 0
        self._line_seconds = _FIRST_SECONDS

    @staticmethod
    def open(run_dir: str | None, peers: Peers) -> RunLog:
        """Open the folder. If worker 0 cannot write there all workers raise. Collective."""
        journal, problem = Journal(None), ""
        if run_dir is not None and peers.rank == 0:
            try:
                journal = Journal(run_dir)
            except ConfigError as error:
                problem = str(error)
        if run_dir is not None:
            problem = peers.gather_text(problem, "opening the run's folder")[0]
        if problem:
            raise ConfigError(problem)
        return RunLog(journal, peers, is_on=run_dir is not None)

    def start(self, hosts: Hosts, device: torch.device) -> None:
        """Write who takes part."""
        self._journal.write(
            "start",
            num_workers=self._peers.num_workers,
            hosts=hosts.names,
            workers=hosts.workers,
            device=device.type,
            torch=torch.__version__,
        )

    def set_cluster(self, cluster: Cluster | None) -> None:
        """Write newly measured links, and remember them."""
        self.cluster = cluster
        self.write_steps()
        if cluster is not None:
            self._journal.write("cluster", **asdict(cluster))

    def plan(self, plan: Plan, step: int, why: str) -> None:
        """Write a plan that is used from now on."""
        if self._journal.is_open:
            self.write_steps()  # These steps had the plan before.
            self._line_seconds = _FIRST_SECONDS
            self._journal.write("plan", step=step, why=why, plan=json.loads(plan.to_json()))

    def note(self, step: int, why: str) -> None:
        """Write an observation that does not change the plan."""
        self._journal.write("note", step=step, why=why)

    def partitions(self, number: int, found_for: dict[str, Any]) -> None:
        """Write the number of partitions that was found for this setting and these links."""
        self._journal.write("partitions", number=number, found_for=found_for, rate=self._rate)

    def known_partitions(self, found_for: dict[str, Any]) -> int | None:
        """Return what an earlier run found for the same setting; the same on all workers.
        Collective."""
        if not self.is_on:
            return None
        found = [
            event.get("number", 0)
            for event in self._journal.kept("partitions")
            if event.get("found_for") == found_for and self._is_similar(event.get("rate"))
        ]
        newest = torch.tensor([found[-1] if found else 0])
        return int(self._peers.broadcast(newest, "reading the run's folder")) or None

    @property
    def _rate(self) -> float | None:
        """The rate of the links between hosts; None if there are none or they were not measured."""
        if self.cluster is None or self.cluster.num_hosts == 1:
            return None
        return self.cluster.between.bytes_per_second

    def _is_similar(self, rate: float | None) -> bool:
        mine = self._rate
        if rate is None or mine is None:
            return rate is mine
        return max(rate, mine) < _OTHER_RATE * min(rate, mine)

    def end_step(self) -> None:
        """Count a step, and write a line if it is time."""
        self._num_steps += 1
        if self._journal.is_open and time.monotonic() - self._written >= self._line_seconds:
            self.write_steps()
            self._line_seconds = min(_GROWTH * self._line_seconds, _MAX_SECONDS)

    def write_steps(self) -> None:
        """Write a line for the steps since the last one."""
        if not self._journal.is_open:
            return
        mean = self._ledger.mean(self._num_steps) if self._num_steps else None
        if mean is not None:
            self._journal.write("steps", number=self._num_steps, mean=mean.as_dict())
        self._num_steps, self._written = 0, time.monotonic()

    def close(self) -> None:
        self.write_steps()
        self._journal.close()
