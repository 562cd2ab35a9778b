"""One attempt at a job: from reaching its hosts until the last of them has ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from parallax.launch import failure
from parallax.launch.channel import wait
from parallax.launch.connection import Connection, close_all, spec_of
from parallax.launch.failure import Failure
from parallax.launch.hosts import is_local
from parallax.launch.interface import is_loopback, source_towards
from parallax.launch.interrupt import Interrupts
from parallax.launch.job import Job
from parallax.launch.output import Screen
from parallax.launch.status import Status
from parallax.launch.streams import Streams

_TICK_SECONDS = 0.5
_LISTEN_SECONDS = 10.0
# After a failure, others may record theirs, so that the first is known. When all that is known
# was caused by a worker that has not been heard of, its host may be lost: that takes longer.
_FOLLOW_SECONDS = 2.0
_CAUSE_SECONDS = 12.0
_STOP_SECONDS = 9.0


class HostsError(Exception):
    """Hosts that cannot take part: a paragraph for each."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    failures: list[Failure]
    """The first one caused the others; none where all went well."""
    stopped_by: int | None
    """The signal that ended the job from outside."""


class Attempt:
    """The connections to the hosts of a job, and what is done with them in turn."""

    def __init__(self, job: Job, screen: Screen, streams: Streams, interrupts: Interrupts) -> None:
        self._job = job
        self._screen = screen
        self._streams = streams
        self._interrupts = interrupts
        self._connections: list[Connection] = []
        self._stopped_by: int | None = None
        self._stop_at: float | None = None
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

    # Beginning ----------------------------------------------------------------------------

    def _reach(self, all_needed: bool) -> None:
        """Connect to every host, and go on with those that are ready."""
        job = self._job
        for host, num_workers in zip(job.hosts, job.num_workers, strict=True):
            spec = spec_of(
                host,
                job.interface,
                num_workers=num_workers,
                program=asdict(job.program),
                devices=host.devices,
                resume=job.resume,
                columns=job.columns,
            )
            has_name = not job.is_local
            self._connections.append(Connection(host, spec, job.ssh_config, has_name=has_name))
        self._pump_until(lambda: all(c.facts or c.is_over for c in self._connections))
        if self._stopped_by is not None:
            return
        problems = [_problem(c, job) for c in self._connections if c.problem is not None]
        ready = [c for c in self._connections if c.problem is None]
        if problems and (all_needed or not ready):
            raise HostsError("\n".join(problems))
        for problem in problems:
            self._screen.say(f"parallax: {problem}\nparallax: going on without it\n")
        close_all([c for c in self._connections if c not in ready])
        self._connections = ready
        self._check_alike()

    def _check_alike(self) -> None:
        """All hosts must run the same torch; they should run the same script."""
        first, *others = self._connections
        assert first.facts is not None
        for other in others:
            assert other.facts is not None
            if _release(other.facts.torch) != _release(first.facts.torch):
                raise HostsError(
                    f"host {other.host.name} has torch {other.facts.torch} and host "
                    f"{first.host.name} has {first.facts.torch}: install the same version on all "
                    "hosts, or name the right `python` in a TOML hosts file"
                )
            if other.facts.script_digest != first.facts.script_digest:
                self._screen.say(
                    f"parallax: warning: {self._job.program.name} on host {other.host.name} is "
                    f"not the same as on host {first.host.name}\n"
                )

    def _start(self) -> None:
        """Open the meeting point on the first host, and send all of them there."""
        addresses = self._addresses()
        first = self._connections[0]
        first.listen(addresses[0], self._job.port)
        self._pump_until(lambda: first.listening_port is not None or first.is_over, _LISTEN_SECONDS)
        if self._stopped_by is not None:
            return
        if first.listening_port is None:
            raise HostsError(_problem(first, self._job))
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
                }
            )
        self._streams.begin(start)
        names = {rank: c.name for c in self._connections for rank in c.ranks}
        self._screen.name_hosts(names)

    def _addresses(self) -> list[str]:
        """Where the hosts reach each other; a loopback will do only for a host that is alone."""
        addresses = [c.facts.address for c in self._connections if c.facts is not None]
        if len(addresses) == 1:
            return addresses
        reachable = next((a for a in addresses if not is_loopback(a)), None)
        for index, connection in enumerate(self._connections):
            if not is_loopback(addresses[index]):
                continue
            if reachable is None or not is_local(connection.host):
                raise HostsError(
                    f"host {connection.host.name} is known as {addresses[index]} only, where other "
                    "hosts cannot reach it: give its `address` in a TOML hosts file"
                )
            addresses[index] = source_towards(reachable)  # it is this machine
        return addresses

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
        live = [c for c in self._connections if not c.is_over]
        fds = [self._interrupts.fileno(), *(fd for c in live for fd in c.readers)]
        open_channels = [c.channel for c in live if not c.channel.is_closed]
        ready = wait(open_channels, fds, _TICK_SECONDS if open_channels else 0.05)
        for connection in live:
            for output in connection.receive(ready):
                rank = connection.ranks.start + output.local_rank
                self._streams.feed(rank, output.stream, output.data)
        for number in self._interrupts.take():
            self._interrupt(number)
        if self._screen.is_broken and self._stopped_by is None:
            self._interrupt(signal.SIGPIPE)
        self._end_after_failure()
        self._show_status()

    def _interrupt(self, number: int) -> None:
        """End the job, or end all at once when asked for a second time."""
        if self._stopped_by is not None:
            self._stop(at_once=True)
            return
        self._stopped_by = number
        if number == signal.SIGINT:
            self._screen.say("parallax: ending the workers (Ctrl-C again ends them at once)\n")
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
        if self._stop_at is None:
            self._stop_at = now
        grace_seconds = _CAUSE_SECONDS if failures[0].secondary else _FOLLOW_SECONDS
        if now > self._stop_at + grace_seconds:
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
            self._screen.set_status(self._status.line(steps, num_workers, num_hosts))
        elif not self._job.is_local:
            num_ready = sum(c.facts is not None for c in self._connections)
            self._screen.set_status(f"{num_ready} of {num_hosts} hosts are ready")

    # Ending -------------------------------------------------------------------------------

    def _close(self) -> None:
        close_all(self._connections)
        self._screen.set_status(None)
        self._streams.finish()
        for record in (record for c in self._connections for record in c.records):
            self._streams.log(record.rank, record.traceback)


def _problem(connection: Connection, job: Job) -> str:
    problem = connection.problem or "no answer came"
    return problem if job.is_local else f"host {connection.host.name}: {problem}"


def _release(version: str | None) -> str:
    """Without the build: `2.6.0+cpu` and `2.6.0+cu124` train together."""
    return (version or "").partition("+")[0]
