"""The agent process of a host, and the ways to end it and its workers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from parallax.launch import failure
from parallax.launch.host.lifeline import PARENT_PID, kill_descendants, kill_group
from parallax.launch.host.reaper import pids_of
from parallax.launch.host.rundir import RUN_DIRECTORY, RunDirectory, read_json, write_json
from parallax.launch.job import AgentSpec, python

_STOP_SECONDS = 6.0
_KILL_SECONDS = 2.0
# How long a worker that has recorded its failure may take to end (exit handlers, threads).
_TEARDOWN_SECONDS = 20.0
_AGENT_LOG_CHARACTERS = 4000


class Supervisor:
    """Starts the agent; `look()` now and then, `finish()` when it says that all is over."""

    def __init__(
        self,
        spec: AgentSpec,
        directory: RunDirectory,
        environ: Mapping[str, str],
        listener: socket.socket | None,
        spared: Collection[int] = (),
    ) -> None:
        self._spared = spared
        self._directory = directory
        self._num_workers = spec.num_workers
        self._is_stopped = False
        self._kill_at: float | None = None
        self._first_record_at: float | None = None
        write_json(directory.agent_spec, asdict(spec))
        self.agent = self._start(environ, listener)

    def _start(
        self, environ: Mapping[str, str], listener: socket.socket | None
    ) -> subprocess.Popen[bytes]:
        with open(self._directory.agent_log, "wb") as log:
            return subprocess.Popen(
                python("parallax.launch.host.agent"),
                env={
                    **environ,
                    RUN_DIRECTORY: self._directory.path,
                    PARENT_PID: str(os.getpid()),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=() if listener is None else (listener.fileno(),),
                # Ctrl-C at the terminal comes to the launcher alone, which decides what to do.
                start_new_session=True,
            )

    def stop(self) -> None:
        """Ask the agent to end the workers, and end them by force some seconds later."""
        self._is_stopped = True
        self._end_soon()

    def kill(self) -> None:
        """End all at once: the workers die with the agent."""
        self._is_stopped = True
        self.agent.kill()

    def look(self) -> bool:
        """Go on to SIGKILL when SIGTERM did not help; whether the agent has ended."""
        now = time.monotonic()
        if self._kill_at is not None:
            if now > self._kill_at:
                self.agent.kill()
        elif self._first_record_at is None:
            if failure.read(self._directory, self._num_workers):
                self._first_record_at = now
        elif now > self._first_record_at + _TEARDOWN_SECONDS:
            self._end_soon()
        return self.agent.poll() is not None

    def finish(self) -> dict[str, Any]:
        """End the agent, and after a job that did not end well also what the workers started.

        Each worker leads a process group of its own, which outlives it while it has members; what
        left that group has this process for a parent by now.
        """
        self.agent.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
            self.agent.wait(_KILL_SECONDS)
        result = read_json(self._directory.result)
        if self._is_stopped or result != []:
            for pid in pids_of(self._directory):
                kill_group(pid)
            kill_descendants(spared=self._spared)
        return {
            "deaths": result,
            "records": [asdict(r) for r in failure.read(self._directory, self._num_workers)],
            "agent_code": self.agent.returncode,
            "agent_log": self._tail() if result is None else "",
        }

    def _end_soon(self) -> None:
        self.agent.terminate()
        if self._kill_at is None:
            self._kill_at = time.monotonic() + _STOP_SECONDS

    def _tail(self) -> str:
        with open(self._directory.agent_log, encoding="utf-8", errors="replace") as file:
            return file.read()[-_AGENT_LOG_CHARACTERS:].strip() or "(nothing)"


def num_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
