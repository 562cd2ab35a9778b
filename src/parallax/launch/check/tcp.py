"""A TCP connection of two hosts that know the same token, with an end to every wait.

It begins with a challenge to each side, so that nobody else takes part; the token itself does not
travel, and no byte that comes is taken for anything but bytes. What follows is neither encrypted
nor signed: measurements, no secrets.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
import time

_MAGIC = b"parallax link 1\n"
_NONCE_BYTES = 32
_DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 20


class EndedError(Exception):
    """The other side closed the connection."""


class ForeignError(Exception):
    """The other side does not know the token, or does not speak this language."""


class Deadline:
    """The moment by which something must have ended."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """The seconds that remain; a TimeoutError when none do."""
        seconds = self._at - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds

    def within(self, seconds: float) -> Deadline:
        """This deadline, or the one in so many seconds if that comes before."""
        return Deadline(min(self._at - time.monotonic(), seconds))


class Wire:
    """A connected socket; every wait ends with a TimeoutError at the deadline."""

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket = connected
        self.deadline = deadline
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Closing drops what is still in the buffers: it would disturb the next measurement.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def introduce(self, token: bytes, request: bytes) -> None:
        """The side that connects: answer the challenge, say what is wanted, challenge back."""
        greeting = self.receive(len(_MAGIC) + _NONCE_BYTES)
        if not greeting.startswith(_MAGIC):
            raise ForeignError
        hello = os.urandom(_NONCE_BYTES) + request
        self.send(hello + _digest(token, b"connects", greeting + hello))
        try:
            answer = self.receive(_DIGEST_BYTES)
        except (EndedError, ConnectionError):
            raise ForeignError from None
        if not hmac.compare_digest(answer, _digest(token, b"listens", greeting + hello)):
            raise ForeignError

    def admit(self, token: bytes, request_bytes: int) -> bytes:
        """The side that listens: what the other wants, once it has shown that it may."""
        greeting = _MAGIC + os.urandom(_NONCE_BYTES)
        self.send(greeting)
        hello = self.receive(_NONCE_BYTES + request_bytes)
        digest = self.receive(_DIGEST_BYTES)
        if not hmac.compare_digest(digest, _digest(token, b"connects", greeting + hello)):
            raise ForeignError
        self.send(_digest(token, b"listens", greeting + hello))
        return hello[_NONCE_BYTES:]

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self.deadline.left())
        self._socket.sendall(data)

    def receive(self, num_bytes: int) -> bytes:
        """Exactly so many bytes."""
        data = b""
        while len(data) < num_bytes:
            self._socket.settimeout(self.deadline.left())
            part = self._socket.recv(num_bytes - len(data))
            if not part:
                raise EndedError
            data += part
        return data

    def count(self, most_bytes: int, seconds: float) -> tuple[int, float]:
        """Receive until so many bytes have come or the time is over: bytes, and seconds."""
        start = time.perf_counter()
        until = self.deadline.within(seconds)
        buffer = bytearray(_CHUNK_BYTES)
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            while num_bytes < most_bytes:
                self._socket.settimeout(until.left())
                part = self._socket.recv_into(buffer, min(len(buffer), most_bytes - num_bytes))
                if part == 0:
                    raise EndedError
                num_bytes += part
        return num_bytes, time.perf_counter() - start

    def flood(self, max_bytes: int) -> None:
        """Send up to `max_bytes`, until the other side has had enough and answers or closes."""
        # Noise, because a tunnel may compress what it carries.
        payload = memoryview(os.urandom(_CHUNK_BYTES))
        self._socket.setblocking(False)
        num_left = max_bytes
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while True:
                for _, events in selector.select(self.deadline.left()):
                    if events & selectors.EVENT_READ:
                        return
                    with contextlib.suppress(BlockingIOError):
                        num_left -= self._socket.send(payload[:num_left])
                if num_left == 0:
                    selector.modify(self._socket, selectors.EVENT_READ)

    def wait_until_closed(self, seconds: float) -> None:
        """Receive and forget until the other side closes."""
        with contextlib.suppress(EndedError, OSError):
            self.count(1 << 62, seconds)


def _digest(token: bytes, role: bytes, said: bytes) -> bytes:
    # The role keeps one side from sending the other's answer back to it.
    return hmac.digest(token, role + said, "sha256")
