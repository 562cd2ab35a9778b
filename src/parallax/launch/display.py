"""What the user gets to see and to keep: the screen, and a log file for each worker."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TextIO

from parallax.launch.host.rundir import Stream
from parallax.launch.output import Lines, Screen

# Beyond this the workers' output waits where it is, and in the end they do, as on a terminal.
_FULL_BYTES = 4 << 20
_LAST_SECONDS = 1.0
_LOOK_SECONDS = 0.2


class Display:
    """Writes in a thread of its own.

    A pager that waits, a terminal that was stopped or a slow disk must not keep the launcher from
    its signs of life, without which hosts take it for dead.
    """

    def __init__(self, screen: Screen, log_dir: str | None) -> None:
        self._screen = screen
        self._log_dir = log_dir
        self._logs: list[TextIO] = []
        self._lines: dict[tuple[int, Stream], Lines] = {}
        self._status: str | None = None
        self._queue: queue.SimpleQueue[tuple[Callable[[], None] | None, int]] = queue.SimpleQueue()
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="parallax-display", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that no more should be read."""
        return self._num_waiting_bytes > _FULL_BYTES

    @property
    def is_broken(self) -> bool:
        """Whether the reader of stdout or stderr is gone."""
        return self._screen.is_broken

    def begin(self, hosts: Mapping[int, str]) -> None:
        """Name the host of each worker, and have a log file for each, from now on."""
        self._do(lambda: self._begin(hosts))

    def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Take what a worker printed."""
        self._do(lambda: self._feed(rank, stream, data), len(data))

    def say(self, text: str, *, is_error: bool = False) -> None:
        """Print something of the launcher's own to stderr."""
        self._do(lambda: self._screen.say(text, is_error=is_error))

    def set_status(self, text: str | None) -> None:
        """Say how the whole job is doing, on a terminal."""
        if text != self._status and not self.is_full:
            self._status = text
            self._do(lambda: self._screen.set_status(text))

    def finish_lines(self) -> None:
        """Show what workers left unfinished when they ended."""
        self._do(self._finish_lines)

    def log(self, rank: int, text: str) -> None:
        """Add text to the worker's log file, where there is one."""
        self._do(lambda: self._log(rank, text))

    def log_all(self, text: str) -> None:
        self._do(lambda: self._log_all(text))

    def close(self, is_given_up: Callable[[], bool]) -> None:
        """Wait until all is written, however long its reader takes, unless it is given up."""
        self._do(self._close)
        self._queue.put((None, 0))
        self._thread.join(_LAST_SECONDS)
        while self._thread.is_alive() and not is_given_up():
            self._thread.join(_LOOK_SECONDS)

    # In the thread ------------------------------------------------------------------------

    def _do(self, action: Callable[[], None], num_bytes: int = 0) -> None:
        with self._lock:
            self._num_waiting_bytes += num_bytes
        self._queue.put((action, num_bytes))

    def _run(self) -> None:
        while True:
            action, num_bytes = self._queue.get()
            if action is None:
                return
            action()
            with self._lock:
                self._num_waiting_bytes -= num_bytes

    def _begin(self, hosts: Mapping[int, str]) -> None:
        self._screen.name_hosts(hosts)
        if self._log_dir is None:
            return
        for rank in range(len(self._logs), len(hosts)):
            path = os.path.join(self._log_dir, f"worker-{rank}.log")
            try:
                file = open(path, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
            except OSError as error:
                self._stop_logging(error)
                return
            self._logs.append(file)

    def _feed(self, rank: int, stream: Stream, data: bytes) -> None:
        lines = self._lines.setdefault((rank, stream), Lines())
        self._pass_on(rank, stream, lines.feed(data), lines.progress)

    def _finish_lines(self) -> None:
        for (rank, stream), lines in self._lines.items():
            self._pass_on(rank, stream, lines.finish(), None)
        self._lines.clear()

    def _pass_on(self, rank: int, stream: Stream, lines: list[str], progress: str | None) -> None:
        self._screen.show(rank, stream, lines, progress)
        self._log(rank, "".join(f"{line}\n" for line in lines))

    def _log(self, rank: int, text: str) -> None:
        if rank >= len(self._logs):
            return
        try:
            self._logs[rank].write(text)
            self._logs[rank].flush()
        except OSError as error:
            self._stop_logging(error)

    def _log_all(self, text: str) -> None:
        for rank in range(len(self._logs)):
            self._log(rank, text)

    def _stop_logging(self, error: OSError) -> None:
        """A disk that is full is no reason to end a training."""
        self._screen.say(f"parallax: no more logs are kept in {self._log_dir}: {error}\n")
        self._close_logs()
        self._log_dir = None

    def _close(self) -> None:
        self._finish_lines()
        self._screen.close()
        self._close_logs()

    def _close_logs(self) -> None:
        for log in self._logs:
            with contextlib.suppress(OSError):  # it holds what could not be written
                log.close()
        self._logs = []
