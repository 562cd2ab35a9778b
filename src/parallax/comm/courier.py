"""A thread that talks to the other workers while the script computes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from parallax.comm.helper import Helper
from parallax.errors import ParallaxError

T = TypeVar("T")


class Courier:
    """Does one errand after the other. What one raises is raised where its result is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._errands = queue.SimpleQueue()
        self._helper: Helper | None = None
        self._is_closed = False

    def send(self, errand: Callable[[], T]) -> Future[T]:
        if self._is_closed:
            raise ParallaxError("the session has ended: nothing can be fetched ahead any more")
        if self._helper is None:
            self._helper = Helper(self._name, self._run, self._stop)
        result: Future[T] = Future()
        self._errands.put((errand, result))
        return result

    def close(self) -> None:
        """Ends after the errands that it has; they are waited for, but not for a lost worker."""
        self._is_closed = True
        if self._helper is not None:
            self._helper.end()

    def _stop(self) -> None:
        self._is_closed = True
        self._errands.put(None)

    def _run(self) -> None:
        while (given := self._errands.get()) is not None:
            errand, result = given
            try:
                result.set_result(errand())
            except BaseException as error:
                result.set_exception(error)
