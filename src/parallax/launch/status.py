"""How a job is doing, in one line."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

_RATE_SECONDS = 10.0


class Status:
    """Counts the steps that all workers have taken."""

    def __init__(self) -> None:
        self._begun_at = time.monotonic()
        self._steps: deque[tuple[float, int]] = deque()

    def line(self, steps: Sequence[int | None], num_workers: int, num_hosts: int) -> str:
        """`steps` are those of each worker that has said so."""
        now = time.monotonic()
        known = [step for step in steps if step is not None]
        words = self._step_words(min(known), now) if len(known) == num_workers else []
        workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
        words.append(workers if num_hosts == 1 else f"{workers} on {num_hosts} hosts")
        minutes, seconds = divmod(int(now - self._begun_at), 60)
        return " · ".join([*words, f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"])

    def _step_words(self, step: int, now: float) -> list[str]:
        if not self._steps or step != self._steps[-1][1]:
            self._steps.append((now, step))
        while len(self._steps) > 2 and self._steps[1][0] < now - _RATE_SECONDS:
            self._steps.popleft()
        since, first = self._steps[0]
        rate = [f"{(step - first) / (now - since):.3g} steps/s"] if step > first else []
        return [f"step {step}", *rate]
