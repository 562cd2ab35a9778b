"""One attempt at a job: from reaching its hosts until the last of them has ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from parallax.launch import failure
from parallax.launch.channel import Output
from parallax.launch.check.readiness import release_of
from parallax.launch.connection import Connection, spec_of
from parallax.launch.display import Display
from parallax.launch.failure import Failure
from parallax.launch.fleet import Fleet, HostsError, addresses_of
from parallax.launch.interrupt import Interrupts
from parallax.launch.job import Job
from parallax.launch.status import Status

_LISTEN_SECONDS = 10.0
# After a failure, others may record theirs, so that the first is known. When all that is known
# was caused by a worker that has not been heard of, its host may be lost: that takes longer.
_FOLLOW_SECONDS = 2.0
_CAUSE_SECONDS = 12.0
_STOP_SECONDS = 9.0


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    failures: list[Failure]
    """The first one caused the others; none where all went well."""
    stopped_by: int | None
    """The signal that ended the job from outside."""


class Attempt:
    """What is done with the hosts of a job, from the first word to the last."""

    def __init__(self, job: Job, display: Display, interrupts: Interrupts) -> None:
        self._job = job
        self._display = display
        self._fleet = Fleet(
            [_connection(job, index) for index in range(len(job.hosts))], interrupts
        )
        self._stopped_by: int | None = None
        self._failed_at: float | None = None
        self._end_by: float | None = None
        self._status = Status()

    def run(self, *, all_needed: bool) -> Outcome:
        """Raises HostsError where not one host, or with `all_needed` not every one, can start."""
        try:
            self._reach(all_needed)
            if self._stopped_by is None:
                self._start()
                self._watch()
        finally:
            self._close()
        return Outcome(self._failures(), self._stopped_by)

    @property
    def _connections(self) -> list[Connection]:
        return self._fleet.connections

    # Beginning ----------------------------------------------------------------------------

    def _reach(self, all_needed: bool) -> None:
        """Wait for every host, and go on with those that can take part."""
        self._pump_until(lambda: self._fleet.are_ready)
        if self._stopped_by is not None:
            return
        problems = _problems(self._connections, self._job)
        if problems and (all_needed or len(problems) == len(self._connections)):
            raise HostsError("\n".join(problems.values()))
        for problem in problems.values():
            self._display.say(f"parallax: {problem}\nparallax: going on without it\n")
        self._fleet.leave_out(list(problems))
        self._compare_scripts()

    def _compare_scripts(self) -> None:
        first, *others = self._connections
        for other in others:
            assert first.facts is not None
            assert other.facts is not None
            if other.facts.script_digest != first.facts.script_digest:
                self._display.say(
                    f"parallax: warning: {self._job.program.name} on host {other.host.name} is "
                    f"not the same as on host {first.host.name}\n"
                )

    def _start(self) -> None:
        """Open the meeting point on the first host, and send all of them there."""
        addresses = addresses_of(self._connections)
        first = self._connections[0]
        first.listen(addresses[0], self._job.port)
        self._pump_until(lambda: first.listening_port is not None or first.is_over, _LISTEN_SECONDS)
        if self._stopped_by is not None:
            return
        if first.listening_port is None:
            raise HostsError(_problem(first, self._job, first.problem or "no answer came"))
        run_id, secret = os.urandom(8).hex(), os.urandom(32).hex()
        start = 0
        for index, connection in enumerate(self._connections):
            connection.ranks = range(start, start + connection.num_workers)
            start = connection.ranks.stop
            connection.start(
                {
                    "run_id": run_id,
                    "secret": secret,
                    "num_hosts": len(self._connections),
                    "host_index": index,
                    "address": addresses[0],
                    "port": first.listening_port,
                    "own_address": addresses[index],
                    "start_seconds": self._job.start_seconds,
                }
            )
        self._display.begin({rank: c.name for c in self._connections for rank in c.ranks})

    # In the middle ------------------------------------------------------------------------

    def _watch(self) -> None:
        """Relay output until every host has ended, and end the others when one has failed."""
        self._pump_until(lambda: all(c.is_over for c in self._connections))

    def _pump_until(self, is_done: Callable[[], bool], seconds: float | None = None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not is_done():
            self._pump()
            now = time.monotonic()
            if deadline is not None and now > deadline:
                return
            if self._end_by is not None and now > self._end_by:
                return  # a host that does not answer ends its part by itself
            if self._stopped_by is not None and not any(c.ranks for c in self._connections):
                return  # nothing has been started

    def _pump(self) -> None:
        """Wait for something, once, and see to it."""
        for number in self._fleet.pump(self._deliver, is_held=self._display.is_full):
            self._interrupt(number)
        if self._display.is_broken and self._stopped_by is None:
            self._interrupt(signal.SIGPIPE)
        self._end_after_failure()
        self._show_status()

    def _deliver(self, rank: int, output: Output) -> None:
        self._display.feed(rank, output.stream, output.data)

    def _interrupt(self, number: int) -> None:
        """End the job, or end all at once when asked for a second time."""
        if self._stopped_by is not None:
            self._stop(at_once=True)
            return
        self._stopped_by = number
        if number == signal.SIGINT:
            self._display.say("parallax: ending the workers (Ctrl-C again ends them at once)\n")
        self._stop()

    def _stop(self, *, at_once: bool = False) -> None:
        for connection in self._connections:
            if not connection.is_over:
                connection.stop(at_once=at_once)
        if self._end_by is None:
            self._end_by = time.monotonic() + _STOP_SECONDS

    def _end_after_failure(self) -> None:
        if self._end_by is not None:
            return
        failures = self._failures()
        if not failures:
            return
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
        grace_seconds = _CAUSE_SECONDS if failures[0].secondary else _FOLLOW_SECONDS
        if now > self._failed_at + grace_seconds:
            self._stop()

    def _failures(self) -> list[Failure]:
        return failure.in_order(
            records=[record for c in self._connections for record in c.records],
            deaths=[death for c in self._connections for death in c.deaths],
            hosts=[loss for c in self._connections for loss in c.losses],
        )

    def _show_status(self) -> None:
        num_workers = sum(len(c.ranks) for c in self._connections)
        num_hosts = len(self._connections)
        if num_workers > 0:
            steps = [step for c in self._connections for step in c.steps]
            self._display.set_status(self._status.line(steps, num_workers, num_hosts))
        elif not self._job.is_local:
            self._display.set_status(f"{self._fleet.num_ready} of {num_hosts} hosts are ready")

    # Ending -------------------------------------------------------------------------------

    def _close(self) -> None:
        self._fleet.close()
        self._display.set_status(None)
        self._display.finish_lines()
        for record in (record for c in self._connections for record in c.records):
            self._display.log(record.rank, record.traceback)


def _connection(job: Job, index: int) -> Connection:
    host = job.hosts[index]
    spec = spec_of(
        host,
        job.interface,
        num_workers=job.num_workers[index],
        program=asdict(job.program),
        devices=host.devices,
        resume=job.resume,
        columns=job.columns,
        link_rate=job.link_rate,
        start_seconds=job.start_seconds,
    )
    return Connection(host, spec, job.ssh_config, has_name=not job.is_local)


def _problems(connections: Sequence[Connection], job: Job) -> dict[Connection, str]:
    """Why hosts cannot take part; all must run the torch of the first that can."""
    found = {c: _problem(c, job, c.problem) for c in connections if c.problem is not None}
    able = [c for c in connections if c.problem is None and c.facts is not None]
    for other in able[1:]:
        first = able[0]
        assert first.facts is not None
        assert other.facts is not None
        if release_of(other.facts.torch) != release_of(first.facts.torch):
            found[other] = (
                f"host {other.host.name} has torch {other.facts.torch} and host {first.host.name} "
                f"has {first.facts.torch}: install the same version on all hosts, or name the "
                "right `python` in a TOML hosts file"
            )
    return found


def _problem(connection: Connection, job: Job, problem: str) -> str:
    return problem if job.is_local else f"host {connection.host.name}: {problem}"
