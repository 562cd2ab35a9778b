"""Detect workers and links whose speed has changed.

[Note: drift] From time to time the workers gather each one's median step and compare it with the
one before. The compute time of a worker shows its speed. The waiting time of the worker that waits
least, per byte, shows the speed of the links: the others wait for this worker as well. It also
depends on how much overlaps with backward, so it only shows when to measure the links again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from parallax.observability.ledger import Record
from parallax.planning.cost import Cluster
from parallax.text import rate

_PACE, _RATE = 1.5, 1.25
"""Factors by which a pace or a measured rate must differ. Steps are noisier than measurements."""
_MIN_SHARE = 0.1
"""Share of a step: links that are waited for less do not matter."""


@dataclass(frozen=True)
class Pace:
    """The median step of one worker."""

    compute_seconds: float
    waiting_seconds: float
    sent_bytes: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.waiting_seconds

    @staticmethod
    def of(records: Sequence[Record]) -> Pace:
        """Return the medians over some steps."""
        return Pace(
            median(record.seconds - record.waiting_seconds for record in records),
            median(record.waiting_seconds for record in records),
            median(record.sent_bytes for record in records),
        )


class Drift:
    """The paces to compare with. They are replaced when new ones differ by much."""

    def __init__(self) -> None:
        self._compute: list[float] = []
        self._waiting: float | None = None

    def of_workers(self, paces: Sequence[Pace]) -> list[str]:
        """Return a message for each worker that has become slower or faster."""
        now = [pace.compute_seconds for pace in paces]
        if not self._compute:
            self._compute = now
        said = []
        for rank, (known, seconds) in enumerate(zip(self._compute, now, strict=True)):
            if _differs(known, seconds, _PACE):
                said.append(
                    f"worker {rank} computes {1e3 * seconds:.1f} ms a step, "
                    f"{1e3 * known:.1f} ms before"
                )
                self._compute[rank] = seconds
        return said

    def of_waits(self, paces: Sequence[Pace]) -> bool:
        """Return whether waiting times have changed so much that the links may have."""
        least = min(paces, key=lambda pace: pace.waiting_seconds)
        sent_bytes = max(pace.sent_bytes for pace in paces)
        if not sent_bytes:
            return False
        now = least.waiting_seconds / sent_bytes
        if self._waiting is None:
            self._waiting = now
        step_seconds = least.compute_seconds + least.waiting_seconds
        was_waiting = self._waiting * sent_bytes
        if max(least.waiting_seconds, was_waiting) < _MIN_SHARE * step_seconds:
            return False
        differs = _differs(was_waiting, least.waiting_seconds, _PACE)
        if differs:
            self._waiting = now
        return differs


def of_links(known: Cluster, now: Cluster) -> str | None:
    """Return a message if links have become slower or faster, else None."""
    kinds = (
        ("between hosts", known.between, now.between),
        ("inside hosts", known.within, now.within),
    )
    said = [
        f"links {where} carry {rate(link.bytes_per_second)}, {rate(before.bytes_per_second)} before"
        for where, before, link in kinds
        if _differs(before.bytes_per_second, link.bytes_per_second, _RATE)
    ]
    return " and ".join(dict.fromkeys(said)) or None


def _differs(before: float, now: float, factor: float) -> bool:
    return max(before, now) > factor * min(before, now)
