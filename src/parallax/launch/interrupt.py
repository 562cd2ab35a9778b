"""The signals that end a job, as something that an event loop can wait for."""

from __future__ import annotations

import signal
import socket
from types import FrameType, TracebackType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While entered, ending signals are collected instead of obeyed.

    `fileno()` becomes readable on any of them and when a child process ends.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._received: list[int] = []
        self.num_taken = 0
        """How many ending signals have come so far."""
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> Interrupts:
        for number in _ENDING:
            # What the parent ignores stays ignored: `nohup parallax run …` outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._previous_wakeup = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[int]:
        """The ending signals that have come since the last call."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        received, self._received = self._received, []
        self.num_taken += len(received)
        return received

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
