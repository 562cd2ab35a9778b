"""Ends what a host process leaves behind when it is killed itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

from parallax.launch.host.lifeline import kill_group
from parallax.launch.host.rundir import RunDirectory, read_json
from parallax.launch.job import python


class Reaper:
    """A process that waits for the end of this one.

    The kernel ends the agent and its workers with their parents, but not what workers started.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._process = subprocess.Popen(
            python("parallax.launch.host.reaper", directory.path),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """The directory is gone: there is nothing left to do."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def main() -> int:
    """Wait for the end of stdin, which is that of the host process."""
    sys.stdin.buffer.read()
    directory = RunDirectory(sys.argv[1])
    for pid in pids_of(directory):
        kill_group(pid)
    shutil.rmtree(directory.path, ignore_errors=True)
    return 0


def pids_of(directory: RunDirectory) -> Iterable[int]:
    """Of the workers, each of which leads a process group."""
    try:
        names = os.listdir(directory.path)
    except FileNotFoundError:
        return []
    files = (os.path.join(directory.path, name) for name in names if name.endswith(".pid"))
    return [pid for file in files if (pid := read_json(file)) is not None]
