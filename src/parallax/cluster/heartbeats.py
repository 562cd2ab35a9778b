"""Heartbeats: each worker posts once a second where it is, so that errors can name a lost peer."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import astuple, dataclass
from typing import Protocol

from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined]

from parallax.comm.threads import BackgroundThread

_log = logging.getLogger("parallax")
BEAT_SECONDS = 1.0
_STORE_IS_GONE = (DistNetworkError, ConnectionError)
"""What a store raises when its server has ended; a client does not connect again."""


@dataclass(frozen=True)
class PostedError:
    """An error of one worker that the others should raise too."""

    kind: str
    """The name of its type."""
    text: str


@dataclass(frozen=True)
class PeerStatus:
    """What a worker said of itself in its last heartbeat."""

    rank: int
    beat: int
    """The number of the heartbeat."""
    where: str
    """The operation that the worker waits in, or waited in last."""
    is_waiting: bool
    error: PostedError | None

    def __str__(self) -> str:
        return f"worker {self.rank} {'is in' if self.is_waiting else 'was last in'} {self.where}"


class RequestServer(Protocol):
    """Answers requests that other workers have left in the store."""

    def answer_requests(self) -> None:
        """Answer all open requests. Called after each heartbeat, in its thread."""


class Heartbeats:
    """Posts this worker's status to the job's store, and reads the status of the others.

    A thread posts every second. The training thread only sets attributes, so heartbeats cost a
    step nothing.
    """

    def __init__(
        self, store: Store, rank: int, num_workers: int, server: RequestServer | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_workers = num_workers
        self._server = server
        self._where: object = "the start"
        self._is_waiting = False
        self.posted_error: PostedError | None = None
        """The error that this worker has posted and not withdrawn."""
        self._posted_by = 0
        """The thread that posted the error."""
        self._beat = 0
        self._has_warned = False
        self._thread = BackgroundThread("parallax-heartbeats")
        self._post()
        self._thread.submit(self._run)

    def begin_wait(self, where: object) -> None:
        """Note the operation that this worker waits in. It is formatted in the thread, when it is
        posted."""
        self._where, self._is_waiting = where, True

    def end_wait(self) -> None:
        """Note that this worker does not wait any more."""
        self._is_waiting = False

    def post_error(self, error: PostedError) -> None:
        """Post an error that the other workers should raise too."""
        self.posted_error, self._posted_by = error, threading.get_ident()
        self._post()

    def withdraw_error(self) -> None:
        """Withdraw the posted error if this thread posted it: its script has handled the error."""
        if self.posted_error is not None and self._posted_by == threading.get_ident():
            self.posted_error = None
            self._post()

    def close(self) -> None:
        """Post the last heartbeat and end the thread."""
        self._where, self._is_waiting = "the end of its session", False
        self._thread.close()

    def statuses(self) -> list[PeerStatus]:
        """Return the status of the other workers, without those that cannot be read."""
        found = []
        for rank in range(self._num_workers):
            if rank != self._rank and (status := self._read(rank)) is not None:
                found.append(status)
        return found

    def silent_workers(self) -> list[int]:
        """Return the workers whose heartbeats have stopped. Takes three heartbeats."""
        if not self._post():
            return [0]  # The store is gone, and with it the worker (or launcher) that has it.
        before = {status.rank: status.beat for status in self.statuses()}
        time.sleep(3 * BEAT_SECONDS)
        after = {status.rank: status.beat for status in self.statuses()}
        others = (rank for rank in range(self._num_workers) if rank != self._rank)
        return [rank for rank in others if rank not in after or after[rank] == before.get(rank)]

    def _run(self) -> None:
        while not self._thread.stopping.wait(BEAT_SECONDS):
            self._post()
            try:
                if self._server is not None:
                    self._server.answer_requests()
            except _STORE_IS_GONE:
                pass  # The next heartbeat ends the thread.
            except Exception as error:
                self._warn("could not answer the other workers", error)
        self._post()

    def _post(self) -> bool:
        """Post a heartbeat. Return whether there is still a store; without one, the thread ends."""
        self._beat += 1
        try:
            error = self.posted_error and astuple(self.posted_error)
            message = json.dumps([self._beat, str(self._where), self._is_waiting, error])
            self._store.set(f"heartbeat/{self._rank}", message)
        except _STORE_IS_GONE:
            self._thread.stop()
            return False
        except Exception as error:
            self._warn("could not post that it is alive", error)
        return True

    def _warn(self, what: str, error: Exception) -> None:
        """Log an unexpected error, once. Heartbeats go on, or this worker would seem lost."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("worker %d %s and goes on", self._rank, what, exc_info=error)

    def _read(self, rank: int) -> PeerStatus | None:
        key = f"heartbeat/{rank}"
        try:
            if not self._store.check([key]):
                return None
            beat, where, is_waiting, error = json.loads(self._store.get(key))
        except (RuntimeError, OSError, ValueError):
            return None
        return PeerStatus(rank, beat, where, is_waiting, error and PostedError(*error))
