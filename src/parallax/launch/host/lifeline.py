"""Ties a process to the life of its parent, so that no end of a job leaves one behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection

PARENT_PID = "PARALLAX_PARENT_PID"
"""The environment variable that tells a child who its parent is."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 2.0
_LOOK_SECONDS = 0.01


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way.

    The host process is the agent's parent and the agent is each worker's, so `kill -9` of the
    host process ends the whole chain. Only SIGKILL will do: the agent would handle SIGTERM, but its
    own workers must not outlive it even when it hangs. Linux only; elsewhere a host process that
    is killed with SIGKILL leaves its workers to end by themselves.
    """
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call above: then no signal will ever come.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own ends, so that all can be found."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_group(pid: int) -> None:
    """End the process group that this process leads, if it has members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_descendants(spared: Collection[int] = ()) -> None:
    """End all that came of this process, in whatever session; their own children come to us."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:  # one may hang in the kernel
        found = [pid for pid in _children() if pid not in spared]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_LOOK_SECONDS)


def _children() -> list[int]:
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:  # not Linux, or a kernel without this file
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
