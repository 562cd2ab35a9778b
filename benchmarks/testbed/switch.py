"""The network between hosts: a bridge in a namespace of its own, and a shaped link to each host."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.testbed.namespace import CLONE_NEWNET, Namespace

NETWORK = "10.83.0"
INTERFACE = "eth0"
BURST = "burst 512k latency 100ms"


def address(port: int) -> str:
    return f"{NETWORK}.{port}"


def _hardware_address(port: int) -> str:
    return f"02:00:0a:53:00:{port:02x}"


class Switch:
    """Ports are numbered; the number is also the last part of the address of the host there."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._hosts: Mapping[int, Namespace] = {}

    def connect(self, hosts: Mapping[int, Namespace]) -> None:
        self._hosts = hosts
        commands = ["link add switch type bridge mcast_snooping 0", "link set switch up"]
        for port, host in hosts.items():
            peer = f"name {INTERFACE} address {_hardware_address(port)} netns {host.pid}"
            commands += [
                f"link add port{port} type veth peer {peer}",
                f"link set port{port} master switch up",
            ]
        _batch("ip", self.namespace, commands)
        # A switch that had to learn would send the first frames to everybody's counters.
        places = [f"{_hardware_address(port)} dev port{port}" for port in hosts]
        _batch("bridge", self.namespace, [f"fdb replace {place} master static" for place in places])
        for port in hosts:
            self._configure(port)

    def _configure(self, port: int) -> None:
        commands = [
            "link set lo up",
            f"addr add {address(port)}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        ]
        # Neighbours are known for good: asking for one that was cut off would end in an error,
        # after seconds, where packets that a network loses end in none.
        commands += [
            f"neigh add {address(other)} lladdr {_hardware_address(other)} dev {INTERFACE}"
            for other in self._hosts
            if other != port
        ]
        _batch("ip", self._hosts[port], commands)

    def shape(self, port: int, rate: str) -> None:
        """Both directions of a link, each at its sender."""
        tbf = f"root tbf rate {rate} {BURST}"
        _batch("tc", self._hosts[port], [f"qdisc replace dev {INTERFACE} {tbf}"])
        _batch("tc", self.namespace, [f"qdisc replace dev port{port} {tbf}"])

    def forward(self, port: int, forwards: bool) -> None:
        """Whether the switch passes frames to and from a port; the link is up in any case."""
        state = 3 if forwards else 0
        _batch("bridge", self.namespace, [f"link set dev port{port} state {state}"])


def _batch(program: str, where: Namespace, commands: list[str]) -> None:
    # Only the network is entered: pids in the commands are those of the machine's /proc.
    text = "\n".join(commands) + "\n"
    where.run([program, "-batch", "-"], kinds=CLONE_NEWNET, input=text)
