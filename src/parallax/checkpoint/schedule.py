"""When the next checkpoint is due."""

from __future__ import annotations

from time import monotonic

from parallax.config import Config

DEFAULT_SECONDS = 600.0


class Schedule:
    """A number of steps or seconds since the last save, whichever comes first."""

    def __init__(self, num_steps: int | None, seconds: float | None) -> None:
        self.num_steps = num_steps
        self.seconds = DEFAULT_SECONDS if num_steps is None and seconds is None else seconds
        self.restart(0)

    @classmethod
    def of(cls, config: Config) -> Schedule:
        return cls(config.checkpoint_steps, config.checkpoint_seconds)

    def restart(self, step: int) -> None:
        """Count from now: there is a checkpoint of this step."""
        self._step, self._time = step, monotonic()

    def steps_are_up(self, step: int) -> bool:
        """Return whether enough steps have passed; the same on all workers."""
        return self.num_steps is not None and step - self._step >= self.num_steps

    def time_is_up(self) -> bool:
        """Return whether enough seconds have passed by this worker's clock. Ask it on one worker
        only, for all."""
        return self.seconds is not None and monotonic() - self._time >= self.seconds

    def __str__(self) -> str:
        parts = [f"{self.num_steps} steps" * (self.num_steps is not None)]
        parts += [f"{self.seconds:g} s" if self.seconds is not None else ""]
        return "every " + " or ".join(filter(None, parts))
