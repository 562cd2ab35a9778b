"""Where each worker is, so that the error of a wait can name who waited for whom."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined]

from parallax.comm.helper import Helper

_log = logging.getLogger("parallax")
BEAT_SECONDS = 1.0
_STORE_IS_GONE = (DistNetworkError, ConnectionError)
"""What a store raises whose server has ended; a client does not connect again."""


@dataclass(frozen=True)
class Report:
    """An error of a worker that the others should raise too."""

    kind: str
    """The name of its type."""
    text: str


@dataclass(frozen=True)
class Sighting:
    """What a worker last said of itself."""

    rank: int
    beat: int
    where: str
    waits: bool
    report: Report | None

    def __str__(self) -> str:
        return f"worker {self.rank} {'is in' if self.waits else 'was last in'} {self.where}"


class Board:
    """A worker's notes on a store that all see, renewed every second by a thread of its own.

    The training thread only sets an attribute; nothing of this is on the way of a step.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_workers: int,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_beat` is called in the thread, between two notes."""
        self._on_beat = on_beat
        self._store = store
        self._rank = rank
        self._num_workers = num_workers
        self._where: object = "the start"
        self._waits = False
        self.report: Report | None = None
        self.reporter = 0
        self._beat = 0
        self._has_told = False
        self._stop = threading.Event()
        self._post()
        self._helper = Helper("parallax-board", self._run, self._stop.set)

    def enter(self, where: object) -> None:
        """Note where this worker waits; it is put into words only when somebody is to read it."""
        self._where, self._waits = where, True

    def leave(self) -> None:
        self._waits = False

    def fail(self, report: Report) -> None:
        """Post an error that the others should raise too."""
        self.report, self.reporter = report, threading.get_ident()
        self._post()

    def recover(self) -> None:
        """Withdraw the error if this thread reported it: its script has gone on after it."""
        if self.report is not None and self.reporter == threading.get_ident():
            self.report = None
            self._post()

    def close(self) -> None:
        self._where, self._waits = "the end of its session", False
        self._helper.end()

    def sightings(self) -> list[Sighting]:
        """The other workers' notes; those whose store or note is gone are left out."""
        found = []
        for rank in range(self._num_workers):
            if rank != self._rank and (sighting := self._read(rank)) is not None:
                found.append(sighting)
        return found

    def silent(self) -> list[int]:
        """Workers whose notes have stopped: they ended, or their host did."""
        if not self._post():
            return [0]  # the store is gone, and with it the worker (or launcher) that has it
        before = {sighting.rank: sighting.beat for sighting in self.sightings()}
        time.sleep(3 * BEAT_SECONDS)
        after = {sighting.rank: sighting.beat for sighting in self.sightings()}
        others = (rank for rank in range(self._num_workers) if rank != self._rank)
        return [rank for rank in others if rank not in after or after[rank] == before.get(rank)]

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._post()
            try:
                self._on_beat()
            except _STORE_IS_GONE:
                pass  # The next note ends the thread.
            except Exception as error:
                self._tell("could not answer the other workers", error)
        self._post()

    def _post(self) -> bool:
        """Renew the note. Returns whether there is still a store; without one, the thread ends."""
        self._beat += 1
        try:
            report = self.report and astuple(self.report)
            note = json.dumps([self._beat, str(self._where), self._waits, report])
            self._store.set(f"board/{self._rank}", note)
        except _STORE_IS_GONE:
            self._stop.set()  # there is nobody to tell any more
            return False
        except Exception as error:
            self._tell("could not post that it is alive", error)
        return True

    def _tell(self, what: str, error: Exception) -> None:
        """Log an unexpected error, once: heartbeats go on, or this worker would seem lost."""
        if not self._has_told:
            self._has_told = True
            _log.warning("worker %d %s and goes on", self._rank, what, exc_info=error)

    def _read(self, rank: int) -> Sighting | None:
        try:
            if not self._store.check([f"board/{rank}"]):
                return None
            beat, where, waits, report = json.loads(self._store.get(f"board/{rank}"))
        except (RuntimeError, OSError, ValueError):
            return None
        return Sighting(rank, beat, where, waits, report and Report(*report))
