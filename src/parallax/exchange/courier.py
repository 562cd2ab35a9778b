"""A thread that talks to the other workers while the script computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_CLOSE_SECONDS = 5.0


class Courier:
    """Does one errand after the other. A daemon: a lost worker must not hold up the process's end.

    What an errand raises is raised where its result is asked for.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._errands = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, errand: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        result: Future[T] = Future()
        self._errands.put((errand, result))
        return result

    def close(self) -> None:
        """Ends after the errands that it has; they are waited for, but not for a lost worker."""
        self._errands.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (given := self._errands.get()) is not None:
            errand, result = given
            try:
                result.set_result(errand())
            except BaseException as error:
                result.set_exception(error)
