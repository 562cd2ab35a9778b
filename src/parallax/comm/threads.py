"""Background threads that end before the interpreter does.

[Note: thread end] A thread that returns from torch's C++ code while the interpreter shuts down is
ended by force. C++ then aborts the whole process, although the training went well. So each thread
is stopped when the process begins to exit, and the exit waits for it, but only for a few seconds:
the thread may be waiting for a lost worker.

That is why `concurrent.futures.ThreadPoolExecutor` is not used here. The interpreter joins its
threads without a timeout, so a lost worker would hold up the end of the process.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from parallax.errors import ParallaxError

_JOIN_SECONDS = 5.0
T = TypeVar("T")


class BackgroundThread:
    """Runs functions one after the other in a thread of its own. See [Note: thread end]."""

    def __init__(self, name: str) -> None:
        self.stopping = threading.Event()
        """Set when the thread should end. A function that runs until then has to watch it."""
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a function after those submitted before it. The first call starts the thread."""
        if self.stopping.is_set():
            raise ParallaxError("the session has ended: nothing can be prefetched any more")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            atexit.register(self.close)
        result: Future[T] = Future()
        self._queue.put((function, result))
        return result

    def stop(self) -> None:
        """Let the thread end after the functions that were submitted. Does not wait for it."""
        self.stopping.set()
        self._queue.put(None)

    def close(self) -> None:
        """Stop the thread and wait for it, at most a few seconds."""
        self.stop()
        if self._thread is not None:
            atexit.unregister(self.close)
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (submitted := self._queue.get()) is not None:
            function, result = submitted
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
