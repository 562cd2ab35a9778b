"""Measuring a link on loopback: what comes out, and that nothing can hold it up."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from parallax.errors import ConfigError, LinkError
from parallax.launch.check import links
from parallax.launch.check.links import Link, Listener, clock_offset, measure, rounds
from parallax.launch.check.tcp import Deadline, EndedError, Wire

TOKEN = os.urandom(32)
SMALL = {"seconds": 2.0, "max_bytes": 4 << 20}
"""Ends by its bytes, however busy the machine is."""


class Serving:
    """A function on a thread, and the error that ended it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(20)
        assert self.has_ended

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.error = error


@contextlib.contextmanager
def served(
    address: str = "127.0.0.1", token: bytes = TOKEN, timeout_seconds: float = 10
) -> Iterator[tuple[int, Serving]]:
    """The port of a listener that answers one measurement."""
    with Listener(address) as listener:
        serving = Serving(lambda: listener.serve(token, timeout_seconds=timeout_seconds))
        yield listener.port, serving
        serving.join()


@contextlib.contextmanager
def pretending(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of something that behaves as told, to one connection after another."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError, EndedError):
                    connected, _ = server.accept()
                    with connected:
                        behave(connected)

        serving = Serving(run)
        yield server.getsockname()[1]
        ended.set()
        serving.join()
        assert serving.error is None


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter limits, so that a test which reaches them is short."""
    monkeypatch.setattr(links, "_CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(links, "_SLACK_SECONDS", 0.3)


@contextlib.contextmanager
def connected_pair() -> Iterator[tuple[Wire, Wire]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with Wire(one, Deadline(10)) as first, Wire(other, Deadline(10)) as second:
        yield first, second


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_link(address: str) -> None:
    if address == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 here")
    with served(address) as (port, serving):
        link = measure(address, port, TOKEN)
    assert serving.error is None
    assert 0 < link.latency_seconds < 0.5
    for rate in (link.send_bytes_per_second, link.receive_bytes_per_second):
        assert 1e6 < rate < 1e12


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_listener_serves_one_after_another() -> None:
    with Listener("127.0.0.1") as listener:
        for _ in range(3):
            serving = Serving(lambda: listener.serve(TOKEN))
            measure("127.0.0.1", listener.port, TOKEN, **SMALL)
            serving.join()
            assert serving.error is None


def test_the_rates_are_what_the_receiver_counted() -> None:
    def behave(connected: socket.socket) -> None:
        connection = Wire(connected, Deadline(5))
        request = connection.admit(TOKEN, struct.calcsize("!cdQ"))
        if request[:1] == b"<":
            while connection.receive(4) == b"ping":
                connection.send(b"ping")
            # The first byte and a quarter of `max_bytes` are not counted, the rest comes late.
            connection.send(bytes(1 + (1 << 20)))
            time.sleep(0.1)
            connection.send(bytes((3 << 20) - 1))
            connection.wait_until_closed(5)
        else:
            connection.send(struct.pack("!Qd", 1000, 2.0))
            connection.wait_until_closed(5)

    with pretending(behave) as port:
        link = measure("127.0.0.1", port, TOKEN, seconds=5.0, max_bytes=4 << 20)
    assert link.send_bytes_per_second == 500
    assert link.receive_bytes_per_second < ((3 << 20) - 1) / 0.1


def test_the_start_is_not_counted() -> None:
    counted = []

    class Counting(Wire):
        def __init__(self) -> None: ...

        def receive(self, num_bytes: int) -> bytes:
            return bytes(num_bytes)

        def count(self, most_bytes: int, seconds: float) -> tuple[int, float]:
            counted.append((most_bytes, seconds))
            return len(counted), seconds

    assert links._count(Counting(), 0.5, 4 << 20) == (2, 0.5)
    assert links._count(Counting(), 10.0, 4 << 20) == (4, 10.0)
    rest = (3 << 20) - 1
    assert counted == [(1 << 20, 0.125), (rest, 0.5), (1 << 20, 0.25), (rest, 10.0)]


def test_a_listener_leaves_the_closing_to_the_one_that_waits_for_its_count() -> None:
    with served() as (port, serving):
        connected = socket.create_connection(("127.0.0.1", port))
        with Wire(connected, Deadline(5)) as connection:
            connection.introduce(TOKEN, struct.pack("!cdQ", b">", 0.1, 1 << 20))
            connection.flood(1 << 20)
            connection.receive(16)
            time.sleep(0.1)
            assert not serving.has_ended
    assert serving.error is None


def test_both_sides_stay_within_the_bytes() -> None:
    with connected_pair() as (sender, receiver):
        serving = Serving(lambda: sender.flood(3_000_000))
        num_bytes, seconds = receiver.count(10_000_000, 0.5)
        assert num_bytes == 3_000_000
        assert seconds >= 0.5
        receiver.send(b"enough")
        serving.join()
        assert serving.error is None


def test_a_count_ends_by_bytes_or_by_time() -> None:
    with connected_pair() as (sender, receiver):
        sender.send(bytes(1000))
        assert receiver.count(600, 5.0)[0] == 600
        assert receiver.count(600, 0.05)[0] == 400
        assert receiver.count(600, 0.05)[0] == 0


def test_a_flood_ends_when_the_other_side_closes() -> None:
    with connected_pair() as (sender, receiver):
        serving = Serving(lambda: sender.flood(1 << 40))
        receiver.count(1 << 20, 5.0)
        receiver.__exit__()
        serving.join()
        assert serving.error is None


def test_waits_end_at_the_deadline() -> None:
    with connected_pair() as (one, _):
        one.deadline = Deadline(0.05)
        with pytest.raises(TimeoutError):
            one.receive(1)
        with pytest.raises(TimeoutError):
            one.send(b"late")
        with pytest.raises(TimeoutError):
            one.flood(1 << 40)
        assert one.count(1, 10.0)[0] == 0


def test_a_part_of_a_wait_does_not_outlast_the_whole() -> None:
    assert 4 < Deadline(5).within(100).left() <= 5
    assert 4 < Deadline(100).within(5).left() <= 5
    with pytest.raises(TimeoutError):
        Deadline(0).within(5).left()


def test_closing_drops_what_was_not_sent() -> None:
    with connected_pair() as (sender, receiver):
        with contextlib.suppress(TimeoutError):
            sender.deadline = Deadline(0.05)
            sender.flood(1 << 40)
        sender.__exit__()
        with pytest.raises(ConnectionResetError):
            receiver.count(1 << 40, 5.0)


def test_another_token_is_refused(hurried: None) -> None:
    with (
        served(token=b"x" * 32, timeout_seconds=0.5) as (port, serving),
        pytest.raises(LinkError, match=rf"127.0.0.1 port {port}: something else than this"),
    ):
        measure("127.0.0.1", port, TOKEN)
    assert isinstance(serving.error, LinkError)
    assert "no other host came to measure the link" in str(serving.error)


@pytest.mark.parametrize("digest", ["random", "reflected"])
def test_a_listener_must_know_the_token_too(digest: str) -> None:
    def behave(connected: socket.socket) -> None:
        connected.sendall(b"parallax link 1\n" + bytes(32))
        hello = connected.recv(32 + struct.calcsize("!cdQ") + 32, socket.MSG_WAITALL)
        connected.sendall(hello[-32:] if digest == "reflected" else os.urandom(32))
        connected.recv(1)

    foreign = pytest.raises(LinkError, match="something else than this check answers")
    with pretending(behave) as port, foreign:
        measure("127.0.0.1", port, TOKEN)


def test_an_answer_heard_before_is_worth_nothing() -> None:
    heard = []

    def behave(connected: socket.socket) -> None:
        connected.sendall(b"parallax link 1\n" + bytes(32))
        heard.append(connected.recv(32 + struct.calcsize("!cdQ") + 32, socket.MSG_WAITALL))

    with pretending(behave) as port, pytest.raises(LinkError):
        measure("127.0.0.1", port, TOKEN)
    with served() as (port, serving):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.recv(48, socket.MSG_WAITALL)
            stranger.sendall(heard[0])
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(32) == b""
        measure("127.0.0.1", port, TOKEN, **SMALL)
    assert serving.error is None


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(200)])
def test_strangers_do_not_keep_a_listener_from_its_work(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(links, "_HANDSHAKE_SECONDS", 0.7)
    with served() as (port, serving), socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(said)
        link = measure("127.0.0.1", port, TOKEN, **SMALL)
    assert link.send_bytes_per_second > 0
    assert serving.error is None


def silent(connected: socket.socket) -> None:
    connected.settimeout(5)
    connected.recv(1 << 16)
    connected.recv(1 << 16)


def dripping(connected: socket.socket) -> None:
    for byte in b"parallax link 1\n" + bytes(32):
        connected.sendall(bytes([byte]))
        time.sleep(0.1)


def deaf(connected: socket.socket) -> None:
    """Admits, answers pings, and then neither sends nor receives."""
    connection = Wire(connected, Deadline(5))
    connection.admit(TOKEN, struct.calcsize("!cdQ"))
    while connection.receive(4) == b"ping":
        connection.send(b"ping")
    connection.wait_until_closed(5)


def deaf_to_data(connected: socket.socket) -> None:
    """Sends its data, but neither takes the other's nor says so."""
    connection = Wire(connected, Deadline(5))
    if connection.admit(TOKEN, struct.calcsize("!cdQ"))[:1] == b"<":
        while connection.receive(4) == b"ping":
            connection.send(b"ping")
        connection.flood(1 << 30)
    else:
        time.sleep(1.5)


@pytest.mark.parametrize("behave", [silent, dripping, deaf, deaf_to_data])
def test_nothing_that_the_other_side_does_holds_a_measurement_up(
    hurried: None, behave: Callable[[socket.socket], None]
) -> None:
    start = time.monotonic()
    with pretending(behave) as port:
        with pytest.raises(LinkError, match="did not come through in time; if the hosts are not"):
            measure("127.0.0.1", port, TOKEN, seconds=0.1)
        assert time.monotonic() - start < 3  # the bound is 0.8 s


def closing(connected: socket.socket) -> None:
    pass


def closing_after_pings(connected: socket.socket) -> None:
    connection = Wire(connected, Deadline(5))
    connection.admit(TOKEN, struct.calcsize("!cdQ"))
    while connection.receive(4) == b"ping":
        connection.send(b"ping")
    connection.send(b"some data")


@pytest.mark.parametrize("behave", [closing, closing_after_pings])
def test_a_connection_that_is_closed_in_the_middle(
    behave: Callable[[socket.socket], None],
) -> None:
    closed = pytest.raises(LinkError, match=r"127.0.0.1 port \d+: the other side closed the")
    with pretending(behave) as port, closed:
        measure("127.0.0.1", port, TOKEN)


def test_something_else_that_listens() -> None:
    heard = []

    def behave(connected: socket.socket) -> None:
        connected.sendall(b"SSH-2.0-x\r\n" * 9)
        heard.append(connected.recv(1000))

    foreign = pytest.raises(LinkError, match="something else than this check answers there")
    with pretending(behave) as port, foreign:
        measure("127.0.0.1", port, TOKEN)
    assert heard in ([], [b""])  # it is told nothing


@pytest.mark.parametrize("result", [(0, 1.0), (5, 0.0), (5, float("nan")), (5, float("inf"))])
def test_a_count_that_makes_no_rate_is_refused(result: tuple[int, float]) -> None:
    with pytest.raises(TimeoutError):
        links._rate(result)


def test_nobody_listens() -> None:
    with Listener("127.0.0.1") as listener:
        port = listener.port
    with pytest.raises(LinkError, match=rf"127.0.0.1 port {port} refused the .* firewall"):
        measure("127.0.0.1", port, TOKEN)


def test_nobody_answers(hurried: None) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):  # fill the queue: the kernel drops what comes then
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        port = server.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(LinkError, match=rf"no answer from 127.0.0.1 port {port} .* firewall"):
            measure("127.0.0.1", port, TOKEN, seconds=10.0)
        assert time.monotonic() - start < 5  # the bound is 0.3 s


def test_a_listener_gives_up_on_one_that_breaks_off() -> None:
    with served() as (port, serving):
        connected = socket.create_connection(("127.0.0.1", port))
        with Wire(connected, Deadline(5)) as connection:
            connection.introduce(TOKEN, struct.pack("!cdQ", b"<", 0.1, 1 << 20))
            connection.send(b"ping")
    assert isinstance(serving.error, LinkError)
    assert "closed the connection in the middle" in str(serving.error)


def test_a_listener_is_at_one_address_only() -> None:
    with Listener("127.0.0.1") as listener, pytest.raises(LinkError, match="refused"):
        measure("127.0.0.2", listener.port, TOKEN)
    for everything in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="needs one address of this host"):
            Listener(everything)
    with pytest.raises(LinkError, match="cannot listen at 192.0.2.1 port 0"):
        Listener("192.0.2.1")


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="the token has 4 bytes, but needs 16"):
        measure("127.0.0.1", 1, b"four")
    for seconds in (0.0, -1.0, 61.0, float("nan")):
        with pytest.raises(ConfigError, match="seconds is"):
            measure("127.0.0.1", 1, TOKEN, seconds=seconds)
    with pytest.raises(ConfigError, match="max_bytes is 1000"):
        measure("127.0.0.1", 1, TOKEN, max_bytes=1000)
    with pytest.raises(LinkError, match="cannot find the address of 'no such name'"):
        measure("no such name", 1, TOKEN)
    with Listener("127.0.0.1") as listener, pytest.raises(ConfigError, match="the token"):
        listener.serve(b"")


def test_a_link_seen_from_the_other_side() -> None:
    assert Link(1.0, 2.0, 3.0).reversed() == Link(1.0, 3.0, 2.0)


@pytest.mark.parametrize("num_hosts", range(13))
def test_rounds_have_every_pair_once_and_each_host_in_one(num_hosts: int) -> None:
    found = rounds(num_hosts)
    for pairs in found:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts)) == num_hosts - num_hosts % 2
    flat = sorted(pair for pairs in found for pair in pairs)
    assert flat == list(itertools.combinations(range(num_hosts), 2))


def test_the_shortest_round_trip_tells_the_clock_best() -> None:
    samples = [(0.0, 104.0, 5.0), (10.0, 110.25, 11.0), (20.0, 121.0, 22.0)]
    assert clock_offset(samples) == (99.75, 0.5)
    assert clock_offset([(5.0, 0.0, 4.0), (6.0, 6.0, 6.5)]) == (-0.25, 0.25)  # set back once
    for nothing in ([], [(5.0, 0.0, 4.0)]):
        with pytest.raises(ValueError, match="no sample"):
            clock_offset(nothing)
