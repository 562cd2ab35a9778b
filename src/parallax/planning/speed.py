"""Compare the speed of workers and links with what it was. See [Note: drift] in drift.py."""

from __future__ import annotations

import math
from dataclasses import astuple

import torch

from parallax.cluster.topology import Hosts
from parallax.comm.peers import Peers
from parallax.planning import links
from parallax.planning.changes import Change, Notice, TunePartitions, UseLinks
from parallax.planning.cost import Cluster
from parallax.planning.drift import Drift, Pace, of_links

_MIN_SECONDS = 200.0
"""Minimum training time between two measurements of the links (up to 2 s each), and between two
searches for the number of partitions."""
_MIN_STEPS = 2000
"""Minimum number of steps between two such searches: the speed of a busy machine always varies."""


class SpeedMonitor:
    """Decides when to measure links again and when to tune the number of partitions again."""

    def __init__(self, peers: Peers, hosts: Hosts, device: torch.device) -> None:
        self._peers = peers
        self._hosts = hosts
        self._device = device
        self._drift = Drift()
        self._seconds_since_links = math.inf
        self._seconds_since_tuning = math.inf
        self._steps_since_tuning = math.inf
        self._wants_tuning = False
        """A worker's speed has changed since the last search for the number of partitions."""

    def reset(self) -> None:
        """Compare with the next steps from now on, not with earlier ones."""
        self._drift = Drift()

    def check(self, num_steps: int, cluster: Cluster | None) -> list[Change]:
        """Compare the last `num_steps` steps with earlier ones. Collective.

        `cluster` is None where the links were never measured.
        """
        paces = self._gather_paces(num_steps)
        seconds = num_steps * max(pace.seconds for pace in paces)
        self._seconds_since_links += seconds
        self._seconds_since_tuning += seconds
        self._steps_since_tuning += num_steps
        changes: list[Change] = [Notice(text) for text in self._drift.of_workers(paces)]
        self._wants_tuning |= bool(changes)
        changes += self._tuning()
        if cluster is None or self._seconds_since_links < _MIN_SECONDS:
            return changes
        if self._drift.of_waits(paces):
            self._seconds_since_links = 0.0
            changes += self._measure_links(cluster)
        return changes

    def _gather_paces(self, num_steps: int) -> list[Pace]:
        mine = Pace.of(list(self._peers.ledger.records)[-num_steps:])
        found = self._peers.gather(
            torch.tensor(astuple(mine), dtype=torch.float64),
            f"telling how fast steps are in step {self._peers.step}",
        )
        return [Pace(*each.tolist()) for each in found]

    def _tuning(self) -> list[Change]:
        too_soon = (
            self._seconds_since_tuning < _MIN_SECONDS or self._steps_since_tuning < _MIN_STEPS
        )
        if not self._wants_tuning or too_soon:
            return []
        self._wants_tuning = False
        self._seconds_since_tuning, self._steps_since_tuning = 0.0, 0
        return [TunePartitions()]

    def _measure_links(self, known: Cluster) -> list[Change]:
        measured = links.measure(self._peers, self._hosts, self._device, None)
        if measured is None:
            return []
        why = of_links(known, measured)
        return [] if why is None else [UseLinks(measured, why)]
