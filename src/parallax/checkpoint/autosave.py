"""Checkpoints that are saved by themselves while a script trains.

[Note: save points] A checkpoint must be of a moment between two steps of the script: everything
that belongs to a step has run (schedulers, counters), and nothing of the next has. The session
does not see the script's loop, but two moments in it:

- A sharded loader is asked for the next batch, and a step was completed with the one before. The
  batch is fetched first, because at the end of an epoch there is none: the script has yet to do
  what it does there, and the save waits for the first batch of the next epoch. Then the save
  comes before the loader's place counts the batch.
- The first reduction of the next step, if the script has no batch of a sharded loader and is not
  in the end of an epoch: it feeds itself. Buffers and random generators have gone on by then, so
  what they were is kept from the end of the step.

[Note: due together] All workers must save at the same moment. Steps are the same on all. The
time is rank 0's: it raises a flag in the header of a reduction, and all hear it there, before the
step ends. No message is sent for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from parallax.checkpoint import generators
from parallax.checkpoint.contents import Contents, Earlier
from parallax.checkpoint.folder import Folder
from parallax.checkpoint.schedule import Schedule
from parallax.checkpoint.together import SAVING, together
from parallax.checkpoint.writer import save
from parallax.comm.peers import Peers
from parallax.errors import CheckpointError

_log = logging.getLogger("parallax")


class Autosave:
    """Saves when the schedule says so, at a save point, and keeps the last checkpoints."""

    def __init__(
        self,
        folder: Folder,
        schedule: Schedule,
        keep: int,
        peers: Peers,
        contents: Callable[[], Contents],
        is_fed: Callable[[int], bool],
    ) -> None:
        self._folder = folder
        self._schedule = schedule
        self._keep = keep
        self._peers = peers
        self._contents = contents
        self._is_fed = is_fed
        """Whether sharded loaders feed a thread of the script: the next save point is theirs."""
        self._is_due = False
        self._at_end: Earlier | None = None
        self._at_fetch: Earlier | None = None
        self._thread = 0
        """The one that trains. Another may read batches ahead, which tells nothing of steps."""
        self._is_safe = False
        """Whether there is a checkpoint to fall back on, and the last save did not fail."""
        self._goes_on = False
        """Whether the checkpoints in the folder, if any, belong to this training."""

    def call(self) -> bool:
        """Whether rank 0 calls all to a save. See [Note: due together]."""
        return self._peers.rank == 0 and self._schedule.time_is_up()

    def loaded(self) -> None:
        """The session has gone to the step of a checkpoint."""
        self._is_due, self._at_end, self._at_fetch = False, None, None
        self._is_safe = self._goes_on = True
        self._schedule.restart(self._peers.step)

    def after_step(self, *, called: bool, is_settled: bool) -> None:
        """An optimizer has stepped; `is_settled` if no other has yet to, in this step."""
        self._thread = threading.get_ident()
        if not self._goes_on:
            self._goes_on = True
            check = self._folder.check_unused
            together(self._peers, SAVING, lambda: check() if self._peers.rank == 0 else None)
        self._is_due |= called or self._schedule.steps_are_up(self._peers.step)
        if self._is_due:
            feeds_itself = is_settled and not self._is_fed(self._thread)
            self._at_end = self._now() if feeds_itself else None

    # Save points. See [Note: save points] --------------------------------------------------

    def before_fetch(self) -> None:
        if self._is_due and self._thread == threading.get_ident():
            self._at_fetch = Earlier(generators.states())  # reading samples may draw numbers

    def before_batch(self) -> None:
        """A loader hands out a batch, after a step with the one before."""
        if self._is_due and self._thread == threading.get_ident():
            self._save(self._at_fetch)

    def before_reduction(self) -> None:
        """The gradients of the next step begin to come together."""
        earlier, self._at_end = self._at_end, None
        if earlier is not None and not self._is_fed(self._thread):
            self._save(earlier)

    def _now(self) -> Earlier:
        buffers = {n: b.detach().clone() for n, b in self._contents().buffers.items()}
        return Earlier(generators.states(), buffers)

    # Saving -------------------------------------------------------------------------------

    def _save(self, earlier: Earlier | None) -> None:
        self._is_due, self._at_end, self._at_fetch = False, None, None
        step, start = self._peers.step, time.monotonic()
        path = self._folder.place_of(step)
        try:
            save(path, dataclasses.replace(self._contents(), earlier=earlier), self._peers)
        except CheckpointError as error:
            if not self._is_safe:
                raise
            self._is_safe = False
            if self._peers.rank == 0:
                with contextlib.suppress(OSError):
                    path.rmdir()  # if nothing is in it
            _log.error("%s. Training goes on; the next save must succeed", error)
        else:
            self._is_safe = True
            if self._peers.rank == 0:
                _log.info("saved %r in %.1f s", str(path), time.monotonic() - start)
                self._prune(step)
        self._schedule.restart(step)

    def _prune(self, step: int) -> None:
        try:
            self._folder.prune(step, self._keep)
        except OSError as error:
            _log.warning("cannot remove old checkpoints: %s", error)
