"""What a training did, step by step, into the run's folder."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from parallax.cost import Cluster
from parallax.journal import Journal
from parallax.ledger import Ledger
from parallax.plan import Plan

_LINE_SECONDS = 1.0
"""Steps that end within a second share a line: the folder must not cost what it tells of."""


class Watch:
    """Writes the plan, its changes and the ledger to a journal."""

    def __init__(self, journal: Journal, ledger: Ledger) -> None:
        self._journal = journal
        self._ledger = ledger
        self._written = time.monotonic()
        self._num_steps = 0

    def start(self, **about: object) -> None:
        self._journal.write("start", **about)

    def cluster(self, cluster: Cluster | None) -> None:
        if cluster is not None:
            self._journal.write("cluster", **asdict(cluster))

    def plan(self, plan: Plan, step: int, why: str) -> None:
        if self._journal.is_open:
            self._journal.write("plan", step=step, why=why, plan=json.loads(plan.to_json()))

    def end_step(self) -> None:
        self._num_steps += 1
        if self._journal.is_open and time.monotonic() - self._written >= _LINE_SECONDS:
            self._write_steps()

    def close(self) -> None:
        self._write_steps()
        self._journal.close()

    def _write_steps(self) -> None:
        mean = self._ledger.mean(self._num_steps) if self._num_steps else None
        if mean is not None:
            self._journal.write("steps", number=self._num_steps, mean=asdict(mean))
        self._num_steps, self._written = 0, time.monotonic()
