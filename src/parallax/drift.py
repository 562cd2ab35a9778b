"""Workers and links that are not as fast as they were.

[Note: drift] Every worker tells its median step now and then, and all compare alike what they hear
with what they heard before. How long a worker computes is its speed. How long the one that waits
least stands waiting for its bytes is that of the links: the others wait for it as well. That also
depends on what the backward hides, so it only says when it is worth to measure the links again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from parallax.cost import Cluster
from parallax.ledger import Record
from parallax.text import rate

_PACE, _RATE = 1.5, 1.25
"""By which factor a pace or a measured rate must differ: steps are noisier than measurements."""
_MIN_SHARE = 0.1
"""Of the step: links that are waited for less do not matter."""


@dataclass(frozen=True)
class Pace:
    """A worker's median step."""

    compute_seconds: float
    waiting_seconds: float
    sent_bytes: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.waiting_seconds

    @staticmethod
    def of(records: Sequence[Record]) -> Pace:
        return Pace(
            median(record.seconds - record.waiting_seconds for record in records),
            median(record.waiting_seconds for record in records),
            median(record.sent_bytes for record in records),
        )


class Drift:
    """What all workers heard of each other, until something differs by much."""

    def __init__(self) -> None:
        self._compute: list[float] = []
        self._waiting: float | None = None

    def of_workers(self, paces: Sequence[Pace]) -> list[str]:
        """What to say of workers that have become slower or faster."""
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
        """Whether the workers wait so differently that links may have changed."""
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
    """What to say of links that carry more or less than before."""
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
