"""Measurements that a host takes beside its other work, for `parallax check`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import asdict

from parallax.errors import ParallaxError
from parallax.launch.channel import Message
from parallax.launch.check.links import Listener, measure

# Enough to see that a connection comes through.
_SHORT_SECONDS = 0.05
_SHORT_BYTES = 1 << 20


class Measuring:
    """Each in a thread of its own, which ends by itself: every wait in it has a limit."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return bool(self._threads)

    def answers(self) -> list[Message]:
        """What there is to tell since the last call."""
        return [self._answers.get() for _ in range(self._answers.qsize())]

    def serve(self, number: int, address: str, token: str) -> None:
        """Wait for another host to measure its link to this one."""
        try:
            listener = Listener(address)
        except ParallaxError as error:
            self._answer(number, {"failed": str(error)})
            return
        self._answer(number, {"serving": listener.port})
        self._run(lambda: self._serve(listener, bytes.fromhex(token)))

    def measure(self, number: int, address: str, port: int, token: str, *, whole: bool) -> None:
        """Measure the link to another, or only see whether there is one."""
        self._run(lambda: self._measure(number, address, port, bytes.fromhex(token), whole))

    def _serve(self, listener: Listener, token: bytes) -> None:
        with listener:
            try:
                listener.serve(token)
            except ParallaxError:
                return  # the other side says what went wrong

    def _measure(self, number: int, address: str, port: int, token: bytes, whole: bool) -> None:
        try:
            if whole:
                link = measure(address, port, token)
            else:
                link = measure(address, port, token, seconds=_SHORT_SECONDS, max_bytes=_SHORT_BYTES)
        except ParallaxError as error:
            self._answer(number, {"failed": str(error)})
        else:
            self._answer(number, {"link": asdict(link)})

    def _answer(self, number: int, answer: Message) -> None:
        """`number` is that of the question: one that comes too late is none of the next."""
        self._answers.put({"answer": answer, "number": number})

    def _run(self, task: Callable[[], None]) -> None:
        thread = threading.Thread(target=task, daemon=True)
        self._threads.append(thread)
        thread.start()
