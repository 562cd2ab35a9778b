"""Measures the link between two hosts: its latency, and its rate in each direction.

One host has a `Listener`, the other calls `measure`. Two connections are made:

    1.  pings there and back, then data from the listener until the other has counted enough
    2.  data to the listener, which counts and sends the count back

Rates are those of the payload, as the receiver counted it: what a sender could hand over says how
large the buffers are. At an MTU of 1500, TCP leaves 0.957 of the rate on the wire as payload.
"""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallax.errors import ConfigError, LinkError
from parallax.launch.check.tcp import Deadline, EndedError, ForeignError, Wire

_REQUEST = struct.Struct("!cdQ")
"""What the connection is for, and the seconds and bytes of the measurement."""
_RESULT = struct.Struct("!Qd")
"""Bytes counted, and in how many seconds."""
_FROM_LISTENER, _TO_LISTENER = b"<", b">"
_PING, _START = b"ping", b"go!\n"

_CONNECT_SECONDS = 3.0
_SLACK_SECONDS = 2.0
_HANDSHAKE_SECONDS = 2.0
_PING_SECONDS = 0.5
_NUM_PINGS = 30
_MAX_PINGS = 1000
_MAX_SECONDS = 60.0
_MIN_BYTES = 1 << 20
_MIN_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Link:
    """What the connection of one host to another can do, as the first sees it."""

    latency_seconds: float
    """One way: half of the median round trip of small messages."""
    send_bytes_per_second: float
    receive_bytes_per_second: float

    def reversed(self) -> Link:
        """The same link as the other host sees it."""
        there, back = self.send_bytes_per_second, self.receive_bytes_per_second
        return Link(self.latency_seconds, back, there)


class ClockOffset(NamedTuple):
    """How far another clock is ahead of this one; the truth is within the uncertainty."""

    offset_seconds: float
    uncertainty_seconds: float


def measure(
    address: str, port: int, token: bytes, *, seconds: float = 0.5, max_bytes: int = 64 << 20
) -> Link:
    """The link to the host whose listener has this address and port.

    Each direction is measured for `seconds`, after a short start in which TCP finds its speed, and
    moves at most `max_bytes`. The whole takes at most 2·seconds + 5 s, whatever the other side
    does; only the lookup of an `address` that is a name comes before that.
    """
    _check(token, seconds, max_bytes)
    where = f"{address} port {port}"
    targets = _resolve(address, port)
    deadline = Deadline(2 * seconds + _SLACK_SECONDS + _CONNECT_SECONDS)
    with _connect(targets, where, deadline) as connection, _explained(where):
        connection.introduce(token, _REQUEST.pack(_FROM_LISTENER, seconds, max_bytes))
        latency_seconds = _ping(connection)
        connection.send(_START)
        received = _rate(_count(connection, seconds, max_bytes))
    with _connect(targets, where, deadline) as connection, _explained(where):
        connection.introduce(token, _REQUEST.pack(_TO_LISTENER, seconds, max_bytes))
        connection.flood(max_bytes)
        sent = _rate(_RESULT.unpack(connection.receive(_RESULT.size)))
    return Link(latency_seconds, sent, received)


class Listener:
    """Where another host measures the link to this one: a port at one address of this host."""

    def __init__(self, address: str, port: int = 0) -> None:
        family, target = _resolve(address, port)[0]
        if target[0] in ("0.0.0.0", "::"):
            raise ConfigError(f"a listener needs one address of this host, not {address!r}")
        try:
            self._socket = socket.create_server(target, family=family, backlog=8)
        except OSError as error:
            raise LinkError(
                f"cannot listen at {address} port {port}: {error.strerror}; give an address of "
                "this host as `address` in the hosts file"
            ) from error
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def serve(self, token: bytes, *, timeout_seconds: float = 30.0) -> None:
        """Answer one `measure` to its end; who does not know the token is sent away.

        Raises `LinkError` when none came within the time, or when one broke off.
        """
        _check(token)
        deadline = Deadline(timeout_seconds)
        is_done = False
        while not is_done:
            connection, where = self._accept(deadline)
            with connection, _explained(where):
                is_done = self._answer(connection, token, deadline)

    def _accept(self, deadline: Deadline) -> tuple[Wire, str]:
        try:
            self._socket.settimeout(deadline.left())
            connected, peer = self._socket.accept()
        except TimeoutError:
            raise LinkError(
                f"no other host came to measure the link at port {self.port}: a firewall "
                "between the hosts is likely; allow TCP connections between them"
            ) from None
        handshake = deadline.within(_HANDSHAKE_SECONDS)
        return Wire(connected, handshake), f"{peer[0]} port {peer[1]}"

    def _answer(self, connection: Wire, token: bytes, deadline: Deadline) -> bool:
        """Do what the other side wants; whether it was the last."""
        try:
            request = connection.admit(token, _REQUEST.size)
        except (EndedError, ForeignError, OSError):
            return False
        purpose, seconds, max_bytes = _REQUEST.unpack(request)
        connection.deadline = deadline.within(2 * seconds + _SLACK_SECONDS)
        if purpose == _FROM_LISTENER:
            _answer_pings(connection)
            connection.flood(max_bytes)
            return False
        connection.send(_RESULT.pack(*_count(connection, seconds, max_bytes)))
        # To close now, with data unread, could destroy the result on its way.
        connection.wait_until_closed(_SLACK_SECONDS)
        return True


def rounds(num_hosts: int) -> list[list[tuple[int, int]]]:
    """Every pair of hosts once, in rounds in which each host is in one pair at the most.

    The circle method of tournaments: the first stays, the others go round. With an odd number
    one host rests in each round.
    """
    if num_hosts < 2:
        return []
    places = list(range(num_hosts + num_hosts % 2))
    half = len(places) // 2
    found = []
    for _ in range(len(places) - 1):
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if max(a, b) < num_hosts])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def clock_offset(samples: Iterable[tuple[float, float, float]]) -> ClockOffset:
    """How far another host's clock is ahead, from (sent, the other's time, received) each.

    The other read its clock at some moment between the two of ours: the shortest round trip
    leaves the least to guess, and half of it is what the guess can be wrong by.
    """
    usable = [sample for sample in samples if sample[2] >= sample[0]]
    if not usable:
        raise ValueError("no sample has a round trip; a clock that is set back makes it negative")
    sent, remote, received = min(usable, key=lambda sample: sample[2] - sample[0])
    return ClockOffset(remote - (sent + received) / 2, (received - sent) / 2)


def _check(token: bytes, seconds: float = 1.0, max_bytes: int = _MIN_BYTES) -> None:
    if len(token) < _MIN_TOKEN_BYTES:
        raise ConfigError(f"the token has {len(token)} bytes, but needs {_MIN_TOKEN_BYTES}")
    if not 0 < seconds <= _MAX_SECONDS:
        raise ConfigError(f"seconds is {seconds}; allowed is more than 0, up to {_MAX_SECONDS:g}")
    if max_bytes < _MIN_BYTES:
        raise ConfigError(f"max_bytes is {max_bytes}; allowed is {_MIN_BYTES} or more")


def _resolve(address: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LinkError(
            f"cannot find the address of {address!r}: {error}; give an IP address as `address` "
            "in the hosts file"
        ) from error
    return [(family, target) for family, _, _, _, target in found]


def _connect(
    targets: list[tuple[socket.AddressFamily, Any]], where: str, deadline: Deadline
) -> Wire:
    """To the first of the targets that answers."""
    until = deadline.within(_CONNECT_SECONDS)
    failure = OSError()
    for family, target in targets:
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.settimeout(until.left())
            connecting.connect(target)
            return Wire(connecting, deadline)
        except OSError as error:
            connecting.close()
            failure = error
    raise LinkError(_why_unconnected(where, failure)) from failure


def _why_unconnected(where: str, error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return (
            f"no answer from {where} within {_CONNECT_SECONDS:g} s: a firewall that drops packets "
            "or a wrong address is likely; allow TCP connections between the hosts, or give the "
            "right `address` in the hosts file"
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{where} refused the connection: a firewall that rejects it is likely, or the check "
            "has ended there; allow TCP connections between the hosts"
        )
    return (
        f"no connection to {where} ({error.strerror}): a wrong address or a firewall is likely; "
        "give the right `address` in the hosts file, or allow TCP connections between the hosts"
    )


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn what ends an established connection into an error that says what to do."""
    try:
        yield
        return
    except ForeignError:
        reason = (
            "something else than this check answers there, or one of the two is too busy; "
            "start the check again"
        )
    except (EndedError, ConnectionError):
        reason = (
            "the other side closed the connection in the middle; see what the other host says, "
            "and whether a firewall cuts connections"
        )
    except TimeoutError:
        reason = (
            "the connection was made, but the data did not come through in time; if the hosts "
            "are not just busy, a firewall or different MTUs are likely"
        )
    except OSError as error:
        reason = f"the connection failed ({error.strerror}); see whether the host is still up"
    raise LinkError(f"cannot measure the link to {where}: {reason}")


def _ping(connection: Wire) -> float:
    """Half of the median round trip; the first, which wakes both sides up, is left out."""
    trips: list[float] = []
    stop = time.perf_counter() + _PING_SECONDS
    while len(trips) <= _NUM_PINGS and (len(trips) < 2 or time.perf_counter() < stop):
        start = time.perf_counter()
        connection.send(_PING)
        connection.receive(len(_PING))
        trips.append(time.perf_counter() - start)
    return statistics.median(trips[1:]) / 2


def _answer_pings(connection: Wire) -> None:
    for _ in range(_MAX_PINGS):
        message = connection.receive(len(_PING))
        if message == _START:
            return
        connection.send(message)
    raise TimeoutError


def _count(connection: Wire, seconds: float, max_bytes: int) -> tuple[int, float]:
    """Receive: how many bytes came, and in how many seconds, after TCP has found its speed.

    The start ends by time on slow links, and by bytes on those where it takes milliseconds.
    """
    first = len(connection.receive(1))
    start_bytes = max_bytes // 4
    connection.count(start_bytes, min(seconds / 4, 0.25))
    return connection.count(max_bytes - start_bytes - first, seconds)


def _rate(counted: tuple[int, float]) -> float:
    num_bytes, seconds = counted
    if num_bytes == 0 or not 0 < seconds < math.inf:
        raise TimeoutError
    return num_bytes / seconds
