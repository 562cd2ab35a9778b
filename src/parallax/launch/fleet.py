"""All the hosts of a job, as the launcher sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from parallax.launch.channel import Output, wait
from parallax.launch.connection import Connection
from parallax.launch.hosts import is_local
from parallax.launch.interface import is_loopback, source_towards
from parallax.launch.interrupt import Interrupts

_TICK_SECONDS = 0.5
_SHORT_TICK_SECONDS = 0.02
_CLOSE_SECONDS = 2.0


class HostsError(Exception):
    """Hosts that cannot take part: a paragraph for each."""


class Fleet:
    """The connections to the hosts, and one wait for all of them."""

    def __init__(self, connections: Sequence[Connection], interrupts: Interrupts) -> None:
        self.connections = list(connections)
        self._interrupts = interrupts

    @property
    def num_ready(self) -> int:
        return sum(c.facts is not None for c in self.connections)

    @property
    def are_ready(self) -> bool:
        """Whether each has said of itself what there is to say, or why it will not."""
        return all(c.is_ready or c.is_over for c in self.connections)

    def pump(
        self, deliver: Callable[[int, Output], None] | None = None, *, is_held: bool = False
    ) -> list[int]:
        """Wait for something, once, and take it in; the ending signals that came.

        While it `is_held` nothing is read, because there is no room for it, and no host is lost.
        """
        live = [c for c in self.connections if not c.is_over]
        channels = [c.channel for c in live if not c.channel.is_closed]
        if is_held:
            ready = wait((), [self._interrupts.fileno()], _SHORT_TICK_SECONDS)
        else:
            fds = [self._interrupts.fileno(), *(fd for c in live for fd in c.readers)]
            ready = wait(channels, fds, _TICK_SECONDS if channels else _SHORT_TICK_SECONDS)
        for connection in live:
            for output in connection.receive(ready, is_held=is_held):
                if deliver is not None:
                    deliver(connection.ranks.start + output.local_rank, output)
        return self._interrupts.take()

    def leave_out(self, connections: Sequence[Connection]) -> None:
        _close(connections)
        self.connections = [c for c in self.connections if c not in connections]

    def close(self) -> None:
        _close(self.connections)


def addresses_of(connections: Sequence[Connection]) -> list[str]:
    """Where hosts reach each other; a loopback will do only for one that is alone.

    A host that is this machine knows no way by which others came: it is where it reaches them.
    """
    addresses = [c.facts.address for c in connections if c.facts is not None]
    if len(addresses) < 2:
        return addresses
    reachable = next((address for address in addresses if not is_loopback(address)), None)
    for index, connection in enumerate(connections):
        if not is_loopback(addresses[index]):
            continue
        if reachable is None or not is_local(connection.host):
            raise HostsError(
                f"host {connection.host.name} is known as {addresses[index]} only, where other "
                "hosts cannot reach it: give its `address` in a TOML hosts file"
            )
        addresses[index] = source_towards(reachable)
    return addresses


def _close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.let_go()
    deadline = time.monotonic() + _CLOSE_SECONDS
    for connection in connections:
        connection.close(max(0.0, deadline - time.monotonic()))
