"""What a script uses a sharded loader for: training, or something else."""

from __future__ import annotations

import threading
from typing import Protocol

from parallax.data.epochs import Epochs


class StepCounter(Protocol):
    @property
    def step(self) -> int:
        """The number of steps so far."""


class BatchSavePoints(Protocol):
    """Moments at which a checkpoint may be saved. See [Note: save points] in autosave.py."""

    def before_fetch(self) -> None:
        """Called before a batch is read."""

    def before_batch(self) -> None:
        """Called before a batch is handed out and counted, after a step with the batch before."""


class LoaderUsage:
    """Observes the batches of one loader, and the steps between them.

    A loader is used for training if steps are completed between its batches. So the script need not
    say which loader evaluates. With gradient accumulation only the batch after a step counts.
    """

    def __init__(
        self,
        epochs: Epochs | None = None,
        counter: StepCounter | None = None,
        save_points: BatchSavePoints | None = None,
    ) -> None:
        self.is_out = False
        """Whether the script has a batch of this loader."""
        self.trains = False
        """Whether a step was completed with the batch that the script had last."""
        self.thread = 0
        """The thread that reads the loader."""
        self._epochs = epochs or Epochs()
        self._counter = counter
        self._save_points = save_points
        self._step_at_start = self._step_at_batch = 0
        self._left: int | None = None
        """The epoch in which the script trained on this loader and left it."""
        self._is_dropped = False
        """The last pass trained nothing."""
        self._done: int | None = None
        """The epoch that a restored script had already finished with this loader."""

    @property
    def _step(self) -> int:
        return 0 if self._counter is None else self._counter.step

    def begin(self) -> None:
        """Note the start of a pass over the loader."""
        self.thread = threading.get_ident()
        self._step_at_start, self._left, self._is_dropped = self._step, None, False

    def before_fetch(self, loader_epoch: int) -> None:
        """Note that the script asks for a batch, and so has finished the one before."""
        self._end_batch()
        if self.trains:
            self._epochs.check_counted(loader_epoch)
        if self._save_points is not None:
            self._save_points.before_fetch()

    def before_batch(self) -> None:
        """Note that the script gets a batch, which the loader's position does not count yet."""
        self.is_out = True
        if self.trains and self._save_points is not None:
            self._save_points.before_batch()
        self._step_at_batch = self._step

    def leave(self) -> None:
        """Note that the script leaves the loop, at the end of the pass or by a `break`."""
        self._end_batch()
        self._is_dropped = self._step == self._step_at_start
        if not self._is_dropped:
            self._left = self._epochs.number
            self._epochs.leave()

    def _end_batch(self) -> None:
        if self.is_out:
            self.is_out, self.trains = False, self._step > self._step_at_batch

    # An epoch with several loaders --------------------------------------------------------

    @property
    def is_left(self) -> bool:
        """Whether the script has trained on this loader in this epoch, and left it."""
        return self._epochs.used and self._left == self._epochs.number

    @property
    def is_over(self) -> bool:
        """Whether a restored script begins a new pass, even if this one is not at its end.

        It does if the epoch is left, or if the pass trained nothing: an interrupted evaluation is
        not continued. Without `session.epochs()` an interrupted training pass is.
        """
        return self.is_left or self._is_dropped

    def restore(self, *, is_left: bool) -> None:
        """Reset after a checkpoint was loaded; `is_left` is from the time of the save."""
        self.is_out = self.trains = self._is_dropped = False
        self._left = None
        self._done = self._epochs.number if is_left else None

    def take_done(self) -> bool:
        """Return whether the pass that begins was finished before the epoch was interrupted, and
        forget it."""
        done, self._done = self._done, None
        return self._epochs.used and done == self._epochs.number
