"""Looks at every host of a hosts file, and has each pair of them measure the link between."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from parallax.launch.channel import wait
from parallax.launch.check import measured
from parallax.launch.check.links import Link, clock_offset, rounds
from parallax.launch.check.readiness import HostFacts, judge
from parallax.launch.check.report import report
from parallax.launch.connection import Connection, close_all, spec_of
from parallax.launch.hosts import Host, is_local
from parallax.launch.interface import source_towards
from parallax.launch.interrupt import Interrupts
from parallax.launch.output import Screen

_TICK_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
_MEASURE_SECONDS = 30.0
_NUM_CLOCK_SAMPLES = 5

_NO_ANSWER = "no answer came in time; start the check again"


class StoppedError(Exception):
    """A signal ended the check."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


def check(hosts: Sequence[Host], interface: str | None, ssh_config: str | None) -> int:
    """Print what was found; 0 where the hosts are ready for a job."""
    screen = Screen(sys.stdout, sys.stderr, os.environ)
    with Interrupts() as interrupts:
        survey = Survey(hosts, interface, ssh_config, screen, interrupts)
        try:
            survey.run()
        except StoppedError as stopped:
            return stopped.exit_code
        finally:
            survey.close()
    print(report(survey.facts, survey.links), end="")
    if any(isinstance(link, Link) for link in survey.links.values()):
        print(f"kept for the planner: {measured.write(hosts, survey.links, os.environ)}")
    return 0 if judge(survey.facts, survey.links).is_ready else 1


class Survey:
    """The connections to the hosts, and what has been found out by them."""

    def __init__(
        self,
        hosts: Sequence[Host],
        interface: str | None,
        ssh_config: str | None,
        screen: Screen,
        interrupts: Interrupts,
    ) -> None:
        self.facts: list[HostFacts] = []
        self.links: dict[tuple[str, str], Link | str] = {}
        self._screen = screen
        self._interrupts = interrupts
        self._connections = [
            Connection(
                host,
                spec_of(host, interface, num_workers=1, program=None),
                ssh_config,
                has_name=True,
            )
            for host in hosts
        ]

    def run(self) -> None:
        self._screen.set_status(f"reaching {len(self._connections)} hosts")
        self._pump_until(lambda: all(c.facts or c.is_over for c in self._connections))
        self.facts = [self._facts_of(connection) for connection in self._connections]
        up = [c for c, facts in zip(self._connections, self.facts, strict=True) if not facts.error]
        addresses = {f.name: f.address for f in self.facts if f.address is not None}
        schedule = rounds(len(up))
        for number, pairs in enumerate(schedule, start=1):
            self._screen.set_status(f"measuring links, round {number} of {len(schedule)}")
            self._measure([(up[one], up[other]) for one, other in pairs], addresses)
        self._screen.set_status(None)

    def close(self) -> None:
        self._screen.close()
        close_all(self._connections)

    # One host -----------------------------------------------------------------------------

    def _facts_of(self, connection: Connection) -> HostFacts:
        name, facts = connection.host.name, connection.facts
        if facts is None or connection.problem is not None:
            return HostFacts(name=name, error=connection.problem or _NO_ANSWER)
        clock = clock_offset(self._clock_samples(connection))
        return HostFacts(
            name=name,
            python=facts.python,
            torch=facts.torch,
            parallax=facts.parallax,
            hostname=facts.hostname,
            address=self._reachable(connection),
            interface=facts.interface,
            num_cores=facts.num_cores,
            gpus=tuple(facts.gpus),
            num_free_ports=facts.num_free_ports,
            clock_offset_seconds=clock.offset_seconds,
            clock_uncertainty_seconds=clock.uncertainty_seconds,
        )

    def _clock_samples(self, connection: Connection) -> list[tuple[float, float, float]]:
        assert connection.facts is not None
        # Were it never to answer, its first words bound its clock well enough.
        now = time.time()
        samples = [(now - _ANSWER_SECONDS, connection.facts.time_seconds, now)]
        for _ in range(_NUM_CLOCK_SAMPLES):
            connection.answers.clear()
            sent = time.time()
            connection.ask("clock")
            self._pump_until(lambda: bool(connection.answers) or connection.is_over, 1.0)
            if connection.answers:
                samples.append((sent, connection.answers[-1]["clock"], time.time()))
        return samples

    def _reachable(self, connection: Connection) -> str:
        """Its address; this machine's own is the one from which it reaches the others."""
        assert connection.facts is not None
        address = connection.facts.address
        others = [c.facts.address for c in self._connections if c.facts and not is_local(c.host)]
        if is_local(connection.host) and connection.host.address is None and others:
            return source_towards(others[0])
        return address

    # Two hosts ----------------------------------------------------------------------------

    def _measure(
        self, pairs: Sequence[tuple[Connection, Connection]], addresses: dict[str, str]
    ) -> None:
        """Each pair at the same time: its link, and whether connections come in both ways."""
        for server, client in pairs:
            self.links[client.host.name, server.host.name] = _NO_ANSWER
        there = self._connect([(client, server) for server, client in pairs], addresses, True)
        back = self._connect(pairs, addresses, False)
        for (server, client), link, other in zip(pairs, there, back, strict=True):
            found = other if isinstance(link, Link) and isinstance(other, str) else link
            self.links[client.host.name, server.host.name] = found

    def _connect(
        self,
        pairs: Sequence[tuple[Connection, Connection]],
        addresses: dict[str, str],
        whole: bool,
    ) -> list[Link | str]:
        """Have the first of each pair measure its link to the second."""
        token = os.urandom(32).hex()
        for client, server in pairs:
            client.answers.clear()
            server.answers.clear()
            server.ask("serve", address=addresses[server.host.name], token=token)
        self._pump_until(
            lambda: all(server.answers or server.is_over for _, server in pairs), _ANSWER_SECONDS
        )
        found: list[Link | str | None] = [_refusal(server) for _, server in pairs]
        for (client, server), refusal in zip(pairs, found, strict=True):
            if refusal is None:
                port = server.answers[0]["serving"]
                address = addresses[server.host.name]
                client.ask("measure", address=address, port=port, token=token, whole=whole)
        self._pump_until(
            lambda: all(
                refusal or client.answers or client.is_over
                for (client, _), refusal in zip(pairs, found, strict=True)
            ),
            _MEASURE_SECONDS,
        )
        return [
            refusal or _result(client) for (client, _), refusal in zip(pairs, found, strict=True)
        ]

    # All hosts ----------------------------------------------------------------------------

    def _pump_until(self, is_done: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_done() and time.monotonic() < deadline:
            live = [c for c in self._connections if not c.is_over]
            fds = [self._interrupts.fileno(), *(fd for c in live for fd in c.readers)]
            ready = wait([c.channel for c in live if not c.channel.is_closed], fds, _TICK_SECONDS)
            for connection in live:
                connection.receive(ready)
            for number in self._interrupts.take():
                raise StoppedError(number)


def _refusal(server: Connection) -> str | None:
    if not server.answers:
        return server.problem or _NO_ANSWER
    return server.answers[0].get("failed")


def _result(client: Connection) -> Link | str:
    if not client.answers:
        return client.problem or _NO_ANSWER
    answer = client.answers[0]
    return answer["failed"] if "failed" in answer else Link(**answer["link"])
