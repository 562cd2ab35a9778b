"""Runs a job: attempt after attempt, until one goes well or none is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from parallax.launch import failure
from parallax.launch.attempt import Attempt, HostsError, Outcome
from parallax.launch.hosts import is_local
from parallax.launch.interrupt import Interrupts
from parallax.launch.job import Job
from parallax.launch.output import Screen
from parallax.launch.streams import Streams


def run(job: Job) -> int:
    """Run the job to its end; the exit code of the command."""
    screen = Screen(sys.stdout, sys.stderr, os.environ)
    with (
        Interrupts() as interrupts,
        _unstoppable(job),
        contextlib.closing(Streams(screen, job.log_dir)) as streams,
    ):
        try:
            outcome = _attempts(job, screen, streams, interrupts)
        except HostsError as error:
            streams.close()
            screen.say("".join(f"parallax: {line}\n" for line in str(error).splitlines()))
            return 1
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if outcome.failures:
        screen.say(failure.report(outcome.failures))
        return outcome.failures[0].exit_code
    return 0


def _attempts(job: Job, screen: Screen, streams: Streams, interrupts: Interrupts) -> Outcome:
    for num_restarts in range(job.max_restarts + 1):
        attempt = Attempt(job, screen, streams, interrupts)
        outcome = attempt.run(all_needed=num_restarts == 0)
        if outcome.stopped_by is not None or not outcome.failures:
            break
        if num_restarts < job.max_restarts:
            line = f"restart {num_restarts + 1} of {job.max_restarts} from {job.resume}"
            screen.say(f"{failure.report(outcome.failures)}parallax: {line}\n")
            streams.log_all(f"--- {line} ---\n")
    return outcome


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
