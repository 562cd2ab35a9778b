"""Carries the workers' output to the screen and to their log files."""

from __future__ import annotations

import os
import selectors
import time
from dataclasses import dataclass, field
from typing import TextIO

from parallax.launch.output import Lines, Screen
from parallax.launch.rundir import STREAMS, RunDirectory, Stream

_CHUNK_BYTES = 1 << 16


@dataclass(eq=False)
class _Source:
    """One stream of one worker."""

    rank: int
    stream: Stream
    fd: int
    lines: Lines = field(default_factory=Lines)


class Relay:
    """Reads every stream of every worker.

    Named pipes carry them, not sockets: a script may open /dev/stdout, which sockets refuse, and
    the pipes can wait for their workers before any of these has started.
    """

    def __init__(
        self, directory: RunDirectory, num_workers: int, screen: Screen, log_dir: str | None
    ) -> None:
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._sources: set[_Source] = set()
        self._logs: list[TextIO] = [] if log_dir is None else _open_logs(log_dir, num_workers)
        for rank in range(num_workers):
            for stream in STREAMS:
                self._open(directory, rank, stream)

    def wake_on(self, fd: int) -> None:
        """Have `pump` return when `fd` is readable; the caller reads from it."""
        self._selector.register(fd, selectors.EVENT_READ)

    def pump(self, timeout_seconds: float) -> None:
        """Wait for output and pass it on, once."""
        for key, _ in self._selector.select(timeout_seconds):
            if key.data is not None:
                self._read(key.data)

    def drain(self, timeout_seconds: float) -> None:
        """Pass on all that is left, until every process that could write has ended."""
        deadline = time.monotonic() + timeout_seconds
        while self._sources and time.monotonic() < deadline:
            num_read = sum(self._read(source) for source in list(self._sources))
            if num_read == 0:
                time.sleep(0.01)

    def log(self, rank: int, text: str) -> None:
        """Add text to the worker's log file, where there is one."""
        if self._logs:
            self._logs[rank].write(text)
            self._logs[rank].flush()

    def close(self) -> None:
        """Show unfinished lines and close everything."""
        for source in list(self._sources):
            self._end(source)
        self._screen.close()
        self._selector.close()
        for log in self._logs:
            log.close()

    def _open(self, directory: RunDirectory, rank: int, stream: Stream) -> None:
        path = directory.fifo(rank, stream)
        os.mkfifo(path, 0o600)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        source = _Source(rank, stream, fd)
        self._sources.add(source)
        self._selector.register(fd, selectors.EVENT_READ, source)

    def _read(self, source: _Source) -> bool:
        """Pass on what is there; whether there was anything."""
        try:
            data = os.read(source.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._pass_on(source, source.lines.feed(data))
        else:
            self._end(source)
        return True

    def _end(self, source: _Source) -> None:
        self._selector.unregister(source.fd)
        os.close(source.fd)
        self._sources.remove(source)
        self._pass_on(source, source.lines.finish())

    def _pass_on(self, source: _Source, lines: list[str]) -> None:
        self._screen.show(source.rank, source.stream, lines, source.lines.progress)
        self.log(source.rank, "".join(f"{line}\n" for line in lines))


def _open_logs(log_dir: str, num_workers: int) -> list[TextIO]:
    os.makedirs(log_dir, exist_ok=True)
    paths = [os.path.join(log_dir, f"worker-{rank}.log") for rank in range(num_workers)]
    return [open(path, "w", encoding="utf-8", errors="replace") for path in paths]
