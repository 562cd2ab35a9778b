"""Messages between the launcher and a host, over a pair of pipes that may lead through ssh."""

from __future__ import annotations

import errno
import json
import os
import select
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parallax.launch.host.rundir import STREAMS, Stream

_HEADER = struct.Struct(">BI")
_SOURCE = struct.Struct(">HB")
_BEAT, _MESSAGE, _OUTPUT = range(3)
_CHUNK_BYTES = 1 << 16
_LONGEST_FRAME = 64 << 20
_LONGEST_GREETING = 1 << 20
# What comes before it on the way to the launcher is the greeting of a login shell.
MARK = b"\0parallax\0"

Message = dict[str, Any]


@dataclass(frozen=True)
class Output:
    """What a worker printed."""

    local_rank: int
    stream: Stream
    data: bytes


class Channel:
    """One end. Nothing here waits: who owns it asks `select` when to receive and to flush."""

    def __init__(self, reader: int, writer: int, *, awaits_mark: bool = False) -> None:
        self.reader, self.writer = reader, writer
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self.is_closed = False
        """Whether the other end is gone."""
        self.heard_at = time.monotonic()
        """When the last bytes came."""
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._awaits_mark = awaits_mark

    @property
    def backlog_bytes(self) -> int:
        """What could not be sent yet."""
        return len(self._outgoing)

    def mark(self) -> None:
        """Begin; see MARK."""
        self._put(MARK)

    def beat(self) -> None:
        """A sign of life."""
        self._send(_BEAT, b"")

    def send(self, message: Message) -> None:
        self._send(_MESSAGE, json.dumps(message).encode("ascii"))

    def send_output(self, output: Output) -> None:
        source = _SOURCE.pack(output.local_rank, STREAMS.index(output.stream))
        self._send(_OUTPUT, source + output.data)

    def send_line(self, message: Message) -> None:
        """A message for a reader that knows no frames."""
        self._put(json.dumps(message).encode("ascii") + b"\n")

    def flush(self) -> None:
        """Write what fits now."""
        while self._outgoing and not self.is_closed:
            try:
                written = os.write(self.writer, self._outgoing[:_CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    raise
                self.is_closed = True
                return
            del self._outgoing[:written]

    def receive(self) -> list[Message | Output]:
        """What has come; beats only move `heard_at`."""
        try:
            data = os.read(self.reader, _CHUNK_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            self.is_closed = True
            return []
        self.heard_at = time.monotonic()
        self._incoming += data
        if self._awaits_mark and not self._find_mark():
            return []
        return self._frames()

    def _find_mark(self) -> bool:
        place = self._incoming.find(MARK)
        if place < 0:
            # The mark may have come in part.
            if len(self._incoming) > _LONGEST_GREETING:
                del self._incoming[: -len(MARK)]
            return False
        del self._incoming[: place + len(MARK)]
        self._awaits_mark = False
        return True

    def _frames(self) -> list[Message | Output]:
        found: list[Message | Output] = []
        start = 0
        while len(self._incoming) - start >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._incoming, start)
            if kind > _OUTPUT or size > _LONGEST_FRAME:
                self.is_closed = True  # this is no frame: nothing after it can be understood
                break
            end = start + _HEADER.size + size
            if len(self._incoming) < end:
                break
            body = bytes(self._incoming[start + _HEADER.size : end])
            start = end
            if kind == _MESSAGE:
                found.append(json.loads(body))
            elif kind == _OUTPUT:
                local_rank, stream = _SOURCE.unpack_from(body)
                found.append(Output(local_rank, STREAMS[stream], body[_SOURCE.size :]))
        del self._incoming[:start]
        return found

    def _send(self, kind: int, body: bytes) -> None:
        self._put(_HEADER.pack(kind, len(body)) + body)

    def _put(self, data: bytes) -> None:
        self._outgoing += data
        self.flush()


def wait(channels: Iterable[Channel], readers: Iterable[int], timeout_seconds: float) -> set[int]:
    """Wait until something can be read, or written that could not be before; the readable ones."""
    poller = select.poll()
    for fd in (*readers, *(channel.reader for channel in channels)):
        poller.register(fd, select.POLLIN)
    for channel in channels:
        if channel.backlog_bytes:
            poller.register(channel.writer, select.POLLOUT)
    ready = {fd for fd, _ in poller.poll(max(0.0, timeout_seconds) * 1000)}
    for channel in channels:
        channel.flush()
    return ready
