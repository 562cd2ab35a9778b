"""Runs a job: attempt after attempt, until one goes well or none is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from parallax.launch import failure
from parallax.launch.attempt import Attempt, Outcome
from parallax.launch.channel import wait
from parallax.launch.display import Display
from parallax.launch.fleet import HostsError
from parallax.launch.hosts import is_local
from parallax.launch.interrupt import Interrupts
from parallax.launch.job import Job
from parallax.launch.output import Screen

# Before hosts are tried again when not one could start: a machine takes a while to boot.
_PAUSE_SECONDS = (10.0, 20.0, 40.0, 60.0)


def run(job: Job) -> int:
    """Run the job to its end; the exit code of the command."""
    display = Display(Screen(sys.stdout, sys.stderr, os.environ), job.log_dir)
    with Interrupts() as interrupts, _unstoppable(job):
        try:
            return _conclude(_attempts(job, display, interrupts), display)
        except HostsError as error:
            display.say(_lines(error), is_error=True)
            return 1
        finally:
            # A signal ends even a command whose reader has stopped reading.
            display.close(is_given_up=lambda: interrupts.num_taken > 0 or bool(interrupts.take()))


def _conclude(outcome: Outcome, display: Display) -> int:
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if not outcome.failures:
        return 0
    display.finish_lines()
    display.say(failure.report(outcome.failures), is_error=True)
    return outcome.failures[0].exit_code


def _attempts(job: Job, display: Display, interrupts: Interrupts) -> Outcome:
    outcome = Attempt(job, display, interrupts).run(all_needed=True)
    reported, num_pauses = None, 0
    for number in range(1, job.max_restarts + 1):
        if outcome.stopped_by is not None or not outcome.failures:
            return outcome
        line = f"restart {number} of {job.max_restarts} from {job.resume}"
        if outcome is not reported:
            display.say(failure.report(outcome.failures), is_error=True)
            reported = outcome
        display.say(f"parallax: {line}\n")
        display.log_all(f"--- {line} ---\n")
        try:
            outcome = Attempt(job, display, interrupts).run(all_needed=False)
        except HostsError as error:
            display.say(_lines(error))
            pause_seconds = _PAUSE_SECONDS[min(num_pauses, len(_PAUSE_SECONDS) - 1)]
            num_pauses += 1
            if number < job.max_restarts:
                display.say(f"parallax: waiting {pause_seconds:.0f} s for a host\n")
                if (stopped_by := _pause(pause_seconds, interrupts)) is not None:
                    return Outcome([], stopped_by)
    return outcome


def _pause(seconds: float, interrupts: Interrupts) -> int | None:
    """Wait, unless a signal ends the job."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        wait((), [interrupts.fileno()], left)
        for number in interrupts.take():
            return number
    return None


def _lines(error: HostsError) -> str:
    return "".join(f"parallax: {line}\n" for line in str(error).splitlines())


@contextlib.contextmanager
def _unstoppable(job: Job) -> Iterator[None]:
    """Ctrl-Z would silence the launcher, and other hosts take its silence for its death."""
    if all(is_local(host) for host in job.hosts):
        yield
        return
    previous = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, previous)
