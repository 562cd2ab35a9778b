"""Looks at every host of a hosts file, and has each pair of them measure the link between."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from parallax.launch.check import measured
from parallax.launch.check.links import Link, rounds
from parallax.launch.check.readiness import HostFacts, judge
from parallax.launch.check.report import report
from parallax.launch.connection import Connection, spec_of
from parallax.launch.fleet import Fleet, HostsError, addresses_of
from parallax.launch.hosts import Host
from parallax.launch.interrupt import Interrupts
from parallax.launch.output import Screen

_ANSWER_SECONDS = 10.0
_MEASURE_SECONDS = 30.0
_NUM_CLOCK_SAMPLES = 5

_NO_ANSWER = "no answer came in time; start the check again"


class StoppedError(Exception):
    """A signal ended the check."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


@dataclass(frozen=True, kw_only=True)
class Way:
    """How hosts are reached, and how they reach each other."""

    interface: str | None = None
    port: int = 0
    """Of the rendezvous, on the first host; 0 is any that is free."""
    ssh_config: str | None = None
    start_seconds: float = 60.0


def check(hosts: Sequence[Host], way: Way) -> int:
    """Print what was found; 0 where the hosts are ready for a job."""
    screen = Screen(sys.stdout, sys.stderr, os.environ)
    with Interrupts() as interrupts:
        survey = Survey(hosts, way, screen, interrupts)
        try:
            survey.run()
        except StoppedError as stopped:
            return stopped.exit_code
        finally:
            survey.close()
    print(report(survey.facts, survey.links), end="")
    if any(isinstance(link, Link) for link in survey.links.values()):
        print(_keep(hosts, survey))
    return 0 if judge(survey.facts, survey.links).is_ready else 1


def _keep(hosts: Sequence[Host], survey: Survey) -> str:
    try:
        return f"kept for the planner: {measured.write(hosts, survey.links, os.environ)}"
    except OSError as error:
        return f"not kept for the planner: {error}"


class Survey:
    """What has been found out of hosts, and by them."""

    def __init__(
        self, hosts: Sequence[Host], way: Way, screen: Screen, interrupts: Interrupts
    ) -> None:
        self.facts: list[HostFacts] = []
        self.links: dict[tuple[str, str], Link | str] = {}
        self._screen = screen
        connections = [
            _connection(host, way, port=way.port if index == 0 else 0)
            for index, host in enumerate(hosts)
        ]
        self._fleet = Fleet(connections, interrupts)

    def run(self) -> None:
        connections = self._fleet.connections
        self._screen.set_status(f"reaching {len(connections)} hosts")
        self._pump_until(lambda: self._fleet.are_ready)
        up = [c for c in connections if c.is_ready and c.problem is None]
        self._compare_clocks(up)
        try:
            addresses = dict(zip(up, addresses_of(up), strict=True))
        except HostsError as error:
            addresses = {}
            self.links = dict.fromkeys(_names(up), str(error))
        self.facts = [_facts_of(c, addresses.get(c)) for c in connections]
        if addresses:
            self._measure_all(addresses)
        self._screen.set_status(None)

    def close(self) -> None:
        self._screen.close()
        self._fleet.close()

    def _compare_clocks(self, connections: Sequence[Connection]) -> None:
        for number in range(2, _NUM_CLOCK_SAMPLES + 1):
            for connection in connections:
                connection.ask_clock()
            self._pump_until(
                lambda: all(c.num_clock_samples >= number or c.is_over for c in connections),  # noqa: B023
                _ANSWER_SECONDS,
            )

    def _measure_all(self, addresses: Mapping[Connection, str]) -> None:
        up = list(addresses)
        schedule = rounds(len(up))
        for number, pairs in enumerate(schedule, start=1):
            self._screen.set_status(f"measuring links, round {number} of {len(schedule)}")
            self._measure([(up[one], up[other]) for one, other in pairs], addresses)

    def _measure(
        self,
        pairs: Sequence[tuple[Connection, Connection]],
        addresses: Mapping[Connection, str],
    ) -> None:
        """Each pair at the same time: its link, and whether connections come in both ways."""
        there = self._connect(pairs, addresses, whole=True)
        back = self._connect([(other, one) for one, other in pairs], addresses, whole=False)
        for (one, other), link, opposite in zip(pairs, there, back, strict=True):
            is_one_way = isinstance(link, Link) and isinstance(opposite, str)
            self.links[one.host.name, other.host.name] = opposite if is_one_way else link

    def _connect(
        self,
        pairs: Sequence[tuple[Connection, Connection]],
        addresses: Mapping[Connection, str],
        *,
        whole: bool,
    ) -> list[Link | str]:
        """Have the first of each pair measure its link to the second."""
        token = os.urandom(32).hex()
        for _, server in pairs:
            server.ask("serve", address=addresses[server], token=token)
        self._await_answers([server for _, server in pairs], _ANSWER_SECONDS)
        served = [(client, server) for client, server in pairs if _refusal(server) is None]
        for client, server in served:
            assert server.answer is not None
            port = server.answer["serving"]
            client.ask("measure", address=addresses[server], port=port, token=token, whole=whole)
        self._await_answers([client for client, _ in served], _MEASURE_SECONDS)
        return [_refusal(server) or _result(client) for client, server in pairs]

    def _await_answers(self, connections: Sequence[Connection], seconds: float) -> None:
        self._pump_until(lambda: all(c.answer or c.is_over for c in connections), seconds)

    def _pump_until(self, is_done: Callable[[], bool], seconds: float = math.inf) -> None:
        deadline = time.monotonic() + seconds
        while not is_done() and time.monotonic() < deadline:
            for number in self._fleet.pump():
                raise StoppedError(number)


def _connection(host: Host, way: Way, port: int) -> Connection:
    spec = spec_of(
        host,
        way.interface,
        num_workers=1,
        program=None,
        port=port,
        start_seconds=way.start_seconds,
    )
    return Connection(host, spec, way.ssh_config, has_name=True)


def _names(connections: Sequence[Connection]) -> list[tuple[str, str]]:
    return list(itertools.combinations([c.host.name for c in connections], 2))


def _facts_of(connection: Connection, address: str | None) -> HostFacts:
    name, facts = connection.host.name, connection.facts
    if facts is None or connection.problem is not None:
        return HostFacts(name=name, error=connection.problem or _NO_ANSWER)
    return HostFacts(
        name=name,
        python=facts.python,
        torch=facts.torch,
        parallax=facts.parallax,
        hostname=facts.hostname,
        address=address or facts.address,
        interface=facts.interface,
        num_cores=facts.num_cores,
        gpus=tuple(facts.gpus),
        num_free_ports=facts.num_free_ports,
        clock_offset_seconds=connection.clock.offset_seconds,
        clock_uncertainty_seconds=connection.clock.uncertainty_seconds,
    )


def _refusal(server: Connection) -> str | None:
    if server.answer is None:
        return server.problem or _NO_ANSWER
    return server.answer.get("failed")


def _result(client: Connection) -> Link | str:
    if client.answer is None:
        return client.problem or _NO_ANSWER
    return client.answer["failed"] if "failed" in client.answer else Link(**client.answer["link"])
