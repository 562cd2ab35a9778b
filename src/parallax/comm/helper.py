"""Threads beside the script's own, which end before the interpreter does.

[Note: end] A thread that comes back from torch's C++ code while the interpreter is ending is taken
out of it by force, and C++ then aborts the whole process, after a training that went well. So each
of these threads is asked to end, and waited for, when the process begins to.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

_END_SECONDS = 5.0


class Helper:
    """A running thread. A daemon: a lost worker must not hold up the process's end for long."""

    def __init__(self, name: str, run: Callable[[], None], stop: Callable[[], None]) -> None:
        """`stop` makes `run` return when it has done what it is about."""
        self._stop = stop
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """Stop, and wait for it a while."""
        atexit.unregister(self.end)
        self._stop()
        self._thread.join(_END_SECONDS)
