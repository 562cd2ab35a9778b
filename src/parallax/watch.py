"""What a training did, step by step, into the run's folder."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import torch

from parallax.comm.peers import Peers
from parallax.cost import Cluster
from parallax.errors import ConfigError
from parallax.hosts import Hosts
from parallax.journal import Journal
from parallax.plan import Plan

_FIRST_SECONDS, _MAX_SECONDS, _GROWTH = 1.0, 60.0, 1.2
"""Steps of a second share a line, later those of a minute: the folder must not cost what it tells
of, nor fill the disk in a training of weeks."""
_OTHER_RATE = 1.5
"""By which links differ for which a number of parts must be found anew."""


class Watch:
    """Writes the plan, its changes and the ledger to a journal, which worker 0 has."""

    def __init__(self, journal: Journal, peers: Peers, *, is_on: bool) -> None:
        self.is_on = is_on
        """Whether there is a folder; the same on all workers."""
        self._journal = journal
        self._peers = peers
        self._ledger = peers.ledger
        self._cluster: Cluster | None = None
        self._written = time.monotonic()
        self._num_steps = 0
        self._line_seconds = _FIRST_SECONDS

    @staticmethod
    def open(run_dir: str | None, peers: Peers) -> Watch:
        """If the folder cannot be written all workers say so. Collective."""
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
        return Watch(journal, peers, is_on=run_dir is not None)

    @property
    def cluster(self) -> Cluster | None:
        """The links between the workers; None where nobody measured them."""
        return self._cluster

    @cluster.setter
    def cluster(self, cluster: Cluster | None) -> None:
        self._cluster = cluster
        self.write_steps()
        if cluster is not None:
            self._journal.write("cluster", **asdict(cluster))

    def start(self, hosts: Hosts, device: torch.device) -> None:
        self._journal.write(
            "start",
            num_workers=self._peers.num_workers,
            hosts=hosts.names,
            workers=hosts.workers,
            device=device.type,
            torch=torch.__version__,
        )

    def plan(self, plan: Plan, step: int, why: str) -> None:
        if self._journal.is_open:
            self.write_steps()  # Those are of the plan before.
            self._line_seconds = _FIRST_SECONDS
            self._journal.write("plan", step=step, why=why, plan=json.loads(plan.to_json()))

    def note(self, step: int, why: str) -> None:
        """Something has changed that a plan may follow from."""
        self._journal.write("note", step=step, why=why)

    def partitions(self, number: int, what: dict[str, Any]) -> None:
        """Keep the number of parts that was found for what is told, and for these links."""
        self._journal.write("partitions", number=number, found_for=what, rate=self._rate)

    def kept_partitions(self, what: dict[str, Any]) -> int | None:
        """What an earlier run found for the same; the same on all workers. Collective."""
        if not self.is_on:
            return None
        found = [
            event.get("number", 0)
            for event in self._journal.kept("partitions")
            if event.get("found_for") == what and self._is_my_rate(event.get("rate"))
        ]
        told = torch.tensor([found[-1] if found else 0])
        return int(self._peers.broadcast(told, "reading the run's folder")) or None

    @property
    def _rate(self) -> float | None:
        """Of the links between hosts, if there are any and they are known."""
        if self._cluster is None or self._cluster.num_hosts == 1:
            return None
        return self._cluster.between.bytes_per_second

    def _is_my_rate(self, rate: float | None) -> bool:
        mine = self._rate
        if rate is None or mine is None:
            return rate is mine
        return max(rate, mine) < _OTHER_RATE * min(rate, mine)

    def end_step(self) -> None:
        self._num_steps += 1
        if self._journal.is_open and time.monotonic() - self._written >= self._line_seconds:
            self.write_steps()
            self._line_seconds = min(_GROWTH * self._line_seconds, _MAX_SECONDS)

    def write_steps(self) -> None:
        """A line for the steps since the last one."""
        if not self._journal.is_open:
            return
        mean = self._ledger.mean(self._num_steps) if self._num_steps else None
        if mean is not None:
            self._journal.write("steps", number=self._num_steps, mean=mean.as_dict())
        self._num_steps, self._written = 0, time.monotonic()

    def close(self) -> None:
        self.write_steps()
        self._journal.close()
