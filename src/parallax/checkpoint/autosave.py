"""Save checkpoints automatically while a script trains.

[Note: save points] A checkpoint must be of a moment between two steps of the script: everything
that belongs to a step has run (schedulers, counters), and nothing of the next step has. The session
does not see the script's loop, but two moments in it:

- A sharded loader is asked for the next batch, and a step was completed with the batch before. The
  batch is fetched first. At the end of an epoch there is none: the script still has to do what it
  does there, so the save waits for the first batch of the next epoch. Then the save is made before
  the loader's position counts the batch.
- The first reduction of the next step begins, if the script has no batch of a sharded loader and is
  not at the end of an epoch: it reads its data by itself. By then buffers and random generators
  have changed, so their states are kept from the end of the step.

[Note: due together] All workers must save at the same moment. The number of steps is the same on
all. The time is that of rank 0: it sets a flag in the header of a reduction, so all workers know it
before the step ends. No extra message is sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import threading
import time

from parallax.checkpoint import generators
from parallax.checkpoint.contents import Earlier
from parallax.checkpoint.folder import Folder
from parallax.checkpoint.schedule import Schedule
from parallax.checkpoint.state import TrainingState
from parallax.checkpoint.together import SAVING, together
from parallax.checkpoint.writer import save
from parallax.comm.peers import Peers
from parallax.errors import CheckpointError

_log = logging.getLogger("parallax")


class Fallback(enum.Enum):
    """Whether a failed save may be ignored."""

    UNCHECKED = "the folder may have checkpoints of another training"
    ABSENT = "there is no checkpoint of this training, or the last save failed"
    PRESENT = "there is a checkpoint to fall back on"


class Autosave:
    """Saves at the first save point after a checkpoint is due, and keeps the last ones."""

    def __init__(
        self, folder: Folder, schedule: Schedule, keep: int, peers: Peers, state: TrainingState
    ) -> None:
        self._folder = folder
        self._schedule = schedule
        self._keep = keep
        self._peers = peers
        self._state = state
        self._is_called = False
        """In this step some worker has asked all workers to save."""
        self._is_due = False
        self._at_end: Earlier | None = None
        self._at_fetch: Earlier | None = None
        self._thread = 0
        """The thread that trains. Another one may read batches ahead, which is no save point."""
        self._fallback = Fallback.UNCHECKED

    def wants_save(self) -> bool:
        """Return whether this worker asks all to save. See [Note: due together]."""
        return self._peers.rank == 0 and self._schedule.time_is_up()

    def call_save(self) -> None:
        """Note that some worker has asked all to save after this step."""
        self._is_called = True

    def after_load(self) -> None:
        """Continue from a checkpoint that was loaded."""
        self._is_due, self._at_end, self._at_fetch = False, None, None
        self._fallback = Fallback.PRESENT
        self._schedule.restart(self._peers.step)

    def after_step(self, *, is_complete: bool) -> None:
        """Check the schedule after an optimizer's step. `is_complete`: all optimizers have made as
        many steps. Collective the first time."""
        self._thread = threading.get_ident()
        if self._fallback is Fallback.UNCHECKED:
            self._fallback = Fallback.ABSENT
            check = self._folder.check_unused
            together(self._peers, SAVING, lambda: check() if self._peers.rank == 0 else None)
        self._is_due |= self._is_called or self._schedule.steps_are_up(self._peers.step)
        self._is_called = False
        if self._is_due:
            reads_by_itself = is_complete and not self._uses_loaders()
            self._at_end = self._now() if reads_by_itself else None

    def _uses_loaders(self) -> bool:
        """Return whether sharded loaders give the training thread its batches, so that the next
        save point is theirs."""
        return self._state.loaders.are_in_use(self._thread)

    # Save points. See [Note: save points] --------------------------------------------------

    def before_fetch(self) -> None:
        """Keep the random states: a loader reads a batch now."""
        if self._is_due and self._thread == threading.get_ident():
            self._at_fetch = Earlier(generators.states())  # reading samples may draw numbers

    def before_batch(self) -> None:
        """Save if it is due: a loader hands out a batch, after a step with the one before."""
        if self._is_due and self._thread == threading.get_ident():
            self._save(self._at_fetch)

    def before_reduction(self) -> None:
        """Save if it is due: the first reduction of the next step begins."""
        earlier, self._at_end = self._at_end, None
        if earlier is not None and not self._uses_loaders():
            self._save(earlier)

    def _now(self) -> Earlier:
        buffers = {n: b.detach().clone() for n, b in self._state.contents().buffers.items()}
        return Earlier(generators.states(), buffers)

    # Saving -------------------------------------------------------------------------------

    def _save(self, earlier: Earlier | None) -> None:
        self._is_due, self._at_end, self._at_fetch = False, None, None
        step, start = self._peers.step, time.monotonic()
        path = self._folder.place_of(step)
        try:
            save(path, dataclasses.replace(self._state.contents(), earlier=earlier), self._peers)
        except CheckpointError as error:
            if self._fallback is not Fallback.PRESENT:
                raise
            self._fallback = Fallback.ABSENT
            if self._peers.rank == 0:
                with contextlib.suppress(OSError):
                    path.rmdir()  # if nothing is in it
            _log.error("%s. Training goes on; the next save must succeed", error)
        else:
            self._fallback = Fallback.PRESENT
            if self._peers.rank == 0:
                _log.info("saved %r in %.1f s", str(path), time.monotonic() - start)
                self._prune(step)
        self._schedule.restart(step)

    def _prune(self, step: int) -> None:
        try:
            self._folder.prune(step, self._keep)
        except OSError as error:
            _log.warning("cannot remove old checkpoints: %s", error)
