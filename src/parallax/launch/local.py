"""Runs a job on this machine: starts it, watches over it, ends it, says how it ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from parallax.launch import failure
from parallax.launch.interrupt import Interrupts
from parallax.launch.job import Job
from parallax.launch.lifeline import PARENT_PID
from parallax.launch.output import Screen
from parallax.launch.relay import Relay
from parallax.launch.rundir import RUN_DIRECTORY, RunDirectory, read_json

_STOP_SECONDS = 8.0
_DRAIN_SECONDS = 5.0
# How long a worker that has recorded its failure may take to end (exit handlers, threads).
_TEARDOWN_SECONDS = 20.0
_TICK_SECONDS = 0.5
_AGENT_LOG_CHARACTERS = 4000


def run(job: Job) -> int:
    """Run the job to its end; the exit code of the command."""
    with (
        Interrupts() as interrupts,
        tempfile.TemporaryDirectory(prefix="parallax-", ignore_cleanup_errors=True) as path,
    ):
        directory = RunDirectory(path)
        screen = Screen(sys.stdout, sys.stderr, os.environ)
        with contextlib.closing(Relay(directory, job.num_workers, screen, job.log_dir)) as relay:
            supervisor = _Supervisor(job, directory, relay, screen)
            supervisor.watch(interrupts)
            for record in failure.read(directory, job.num_workers):
                relay.log(record.rank, record.traceback)
        if supervisor.stopped_by is not None:
            return 128 + supervisor.stopped_by
        return _conclude(job, directory, screen, supervisor.agent.returncode)


class _Supervisor:
    """The agent process, and the ways to end it."""

    def __init__(self, job: Job, directory: RunDirectory, relay: Relay, screen: Screen) -> None:
        self.stopped_by: int | None = None
        """The signal that ended the job from outside."""
        self._num_workers = job.num_workers
        self._directory = directory
        self._relay = relay
        self._screen = screen
        self._kill_at: float | None = None
        self._first_record_at: float | None = None
        self._next_look_at = 0.0
        self.agent = _start_agent(job, directory)

    def watch(self, interrupts: Interrupts) -> None:
        """Relay output until the job has ended and nothing of it is left."""
        self._relay.wake_on(interrupts.fileno())
        try:
            while self.agent.poll() is None:
                self._relay.pump(_TICK_SECONDS)
                for number in interrupts.take():
                    self._stop(number)
                if self._screen.is_broken and self.stopped_by is None:
                    self._stop(signal.SIGPIPE)
                self._end_what_hangs()
        finally:
            self._end_everything()
        self._relay.drain(_DRAIN_SECONDS)

    def _stop(self, number: int) -> None:
        """Ask the agent to end the workers, or end all at once when asked for a second time."""
        if self.stopped_by is not None:
            self.agent.kill()
            return
        self.stopped_by = number
        if number == signal.SIGINT:
            self._screen.say("parallax: ending the workers (Ctrl-C again ends them at once)\n")
        self._end_soon()

    def _end_soon(self) -> None:
        self.agent.terminate()
        self._kill_at = time.monotonic() + _STOP_SECONDS

    def _end_what_hangs(self) -> None:
        """Go on to SIGKILL when SIGTERM did not help, and end a failed worker that stays."""
        now = time.monotonic()
        if now < self._next_look_at:
            return
        self._next_look_at = now + _TICK_SECONDS
        if self._kill_at is not None:
            if now > self._kill_at:
                self.agent.kill()  # the workers die with it
        elif self._first_record_at is None:
            if failure.read(self._directory, self._num_workers):
                self._first_record_at = now
        elif now > self._first_record_at + _TEARDOWN_SECONDS:
            self._end_soon()

    def _end_everything(self) -> None:
        """End the agent, and after a job that did not end well also what the workers started.

        Each worker leads a process group of its own, which outlives it while it has members.
        """
        self.agent.kill()
        self.agent.wait()
        if self.stopped_by is None and read_json(self._directory.result) == []:
            return
        for rank in range(self._num_workers):
            pid = read_json(self._directory.pid(rank))
            if pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)


def _start_agent(job: Job, directory: RunDirectory) -> subprocess.Popen[bytes]:
    environ = dict(os.environ)
    environ[RUN_DIRECTORY] = directory.path
    environ[PARENT_PID] = str(os.getpid())
    environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // job.num_workers)))
    if sys.stderr.isatty():
        # Progress bars ask for the width: what is left of it beside the worker's name.
        columns = shutil.get_terminal_size().columns - len("[worker 0] ")
        environ.setdefault("COLUMNS", str(max(columns, 20)))
    with open(directory.agent_log, "wb") as log:
        return subprocess.Popen(
            job.agent_command(),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C at the terminal comes to the launcher alone, which decides what to do.
            start_new_session=True,
        )


def _conclude(job: Job, directory: RunDirectory, screen: Screen, agent_code: int) -> int:
    """Say why the job failed, if it did; the exit code."""
    result = read_json(directory.result)
    failures = failure.in_order(
        records=failure.read(directory, job.num_workers),
        deaths=[failure.from_death(**death) for death in result or []],
    )
    if failures:
        screen.say(failure.report(failures))
        return failures[0].exit_code
    if result is None:
        how = f"by signal {-agent_code}" if agent_code < 0 else f"with exit code {agent_code}"
        screen.say(
            f"parallax: the process that starts the workers was ended {how}. It said:\n"
            f"{_tail(directory.agent_log)}\n"
        )
        return 1
    return 0


def _tail(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()[-_AGENT_LOG_CHARACTERS:].strip() or "(nothing)"


def _num_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
