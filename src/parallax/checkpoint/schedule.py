"""When the next checkpoint is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from parallax.config import Config

DEFAULT_SECONDS = 600.0


class Schedule:
    """Every so many steps or seconds since the last save, whichever comes first."""

    def __init__(
        self,
        num_steps: int | None,
        seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_steps = num_steps
        self.seconds = DEFAULT_SECONDS if num_steps is None and seconds is None else seconds
        self._clock = clock
        self.restart(0)

    @classmethod
    def of(cls, config: Config) -> Schedule:
        return cls(config.checkpoint_steps, config.checkpoint_seconds)

    def restart(self, step: int) -> None:
        """A checkpoint of this step is there; count from here."""
        self._step, self._time = step, self._clock()

    def steps_are_up(self, step: int) -> bool:
        return self.num_steps is not None and step - self._step >= self.num_steps

    def time_is_up(self) -> bool:
        """By this worker's clock: one worker must ask it for all."""
        return self.seconds is not None and self._clock() - self._time >= self.seconds

    def __str__(self) -> str:
        parts = [f"{self.num_steps} steps" * (self.num_steps is not None)]
        parts += [f"{self.seconds:g} s" if self.seconds is not None else ""]
        return "every " + " or ".join(filter(None, parts))
