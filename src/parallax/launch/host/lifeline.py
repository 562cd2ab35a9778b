"""Ties a process to the life of its parent, so that no end of a job leaves one behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID = "PARALLAX_PARENT_PID"
"""The environment variable that tells a child who its parent is."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way.

    The launcher is the agent's parent and the agent is each worker's, so `kill -9` of the
    launcher ends the whole chain. Only SIGKILL will do: the agent would handle SIGTERM, but its
    own workers must not outlive it even when it hangs. Linux only; elsewhere a launcher that is
    killed with SIGKILL leaves its workers to end by themselves.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have ended before the call above: then no signal will ever come.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
