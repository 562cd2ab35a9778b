"""Reads what the workers of a host print."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from parallax.launch.channel import Output
from parallax.launch.host.rundir import STREAMS, RunDirectory, Stream

_CHUNK_BYTES = 1 << 16


class Relay:
    """Every stream of every worker.

    Named pipes carry them, not sockets: a script may open /dev/stdout, which sockets refuse, and
    the pipes can wait for their workers before any of these has started.
    """

    def __init__(
        self, directory: RunDirectory, num_workers: int, deliver: Callable[[Output], None]
    ) -> None:
        self._deliver = deliver
        self._sources: dict[int, tuple[int, Stream]] = {}
        for local_rank in range(num_workers):
            for stream in STREAMS:
                self._open(directory, local_rank, stream)

    @property
    def readers(self) -> list[int]:
        return list(self._sources)

    def read(self, fd: int) -> bool:
        """Pass on what is there; whether there was anything."""
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        local_rank, stream = self._sources[fd]
        if data:
            self._deliver(Output(local_rank, stream, data))
        else:
            self._end(fd)
        return True

    def drain(self, timeout_seconds: float) -> None:
        """Pass on all that is left, until every process that could write has ended."""
        deadline = time.monotonic() + timeout_seconds
        while self._sources and time.monotonic() < deadline:
            num_read = sum(self.read(fd) for fd in self.readers)
            if num_read == 0:
                time.sleep(0.01)

    def close(self) -> None:
        for fd in self.readers:
            self._end(fd)

    def _open(self, directory: RunDirectory, local_rank: int, stream: Stream) -> None:
        path = directory.fifo(local_rank, stream)
        os.mkfifo(path, 0o600)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._sources[fd] = (local_rank, stream)

    def _end(self, fd: int) -> None:
        os.close(fd)
        del self._sources[fd]
