"""The workers' output on its way to the screen and to their log files."""

from __future__ import annotations

import os
from typing import TextIO

from parallax.launch.host.rundir import Stream
from parallax.launch.output import Lines, Screen


class Streams:
    """Every stream of every worker of a job, over all of its restarts."""

    def __init__(self, screen: Screen, log_dir: str | None) -> None:
        self._screen = screen
        self._log_dir = log_dir
        self._logs: list[TextIO] = []
        self._lines: dict[tuple[int, Stream], Lines] = {}
        if log_dir is not None:
            os.makedirs(log_dir, exist_ok=True)

    def begin(self, num_workers: int) -> None:
        """Have a log file for each worker from now on."""
        if self._log_dir is None:
            return
        for rank in range(len(self._logs), num_workers):
            path = os.path.join(self._log_dir, f"worker-{rank}.log")
            self._logs.append(open(path, "w", encoding="utf-8", errors="replace"))  # noqa: SIM115

    def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        lines = self._lines.setdefault((rank, stream), Lines())
        self._pass_on(rank, stream, lines.feed(data), lines.progress)

    def finish(self) -> None:
        """Show what workers left unfinished when they ended."""
        for (rank, stream), lines in self._lines.items():
            self._pass_on(rank, stream, lines.finish(), None)
        self._lines.clear()

    def log(self, rank: int, text: str) -> None:
        """Add text to the worker's log file, where there is one."""
        if rank < len(self._logs):
            self._logs[rank].write(text)
            self._logs[rank].flush()

    def log_all(self, text: str) -> None:
        for rank in range(len(self._logs)):
            self.log(rank, text)

    def close(self) -> None:
        self.finish()
        self._screen.close()
        for log in self._logs:
            log.close()

    def _pass_on(self, rank: int, stream: Stream, lines: list[str], progress: str | None) -> None:
        self._screen.show(rank, stream, lines, progress)
        self.log(rank, "".join(f"{line}\n" for line in lines))
