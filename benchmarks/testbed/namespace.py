"""A machine's own view of network, name, mounts and processes, and commands that run in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

INIT = Path(__file__).with_name("init.py")
FILES = "/run/testbed"  # as in init.py
UNSHARE = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]
START_SECONDS = 20.0
CLOSE_SECONDS = 20.0

# From <linux/sched.h>
CLONE_FS = 0x200
CLONE_NEWNET = 0x40000000
CLONE_ALL = CLONE_NEWNET | 0x20000 | 0x4000000 | 0x8000000 | 0x20000000  # mount, uts, ipc, pid


class TestbedError(RuntimeError):
    """The test bed could not do what it was asked; the message says what and why."""

    __test__ = False  # not a test, whatever pytest makes of the name


def find_program(name: str) -> str | None:
    """The path of a program; those for administrators are not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Namespace:
    """Started by making it, and in order after `wait_ready`; so that several start side by side."""

    def __init__(self, name: str, owner: int) -> None:
        self.name = name
        self.pid = 0
        self._pidfd = -1
        self._children: list[subprocess.Popen[Any]] = []
        python = [sys.executable, "-I", "-S", str(INIT), name, str(owner)]
        # A session of its own: Ctrl-C is for the command that runs, not for the hosts.
        self._process = subprocess.Popen(
            [*UNSHARE, *python],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[owner],
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], START_SECONDS)[0]
        line = self._process.stdout.readline() if ready else "no answer"
        if not line.startswith("ready "):
            self._process.kill()
            said = line + (self._process.stdout.read() if ready else "")
            raise TestbedError(f"host {self.name!r} did not start: {said.strip()}")
        self.pid = int(line.split()[1])
        # Held, so that nobody else is ever meant by a pid that was given away again.
        self._pidfd = os.pidfd_open(self.pid)
        if self._process.poll() is not None:
            raise TestbedError(f"host {self.name!r} ended as soon as it was started")

    @property
    def alive(self) -> bool:
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    def path(self, path: str) -> Path:
        """Where this process finds a path of the host."""
        self.check_alive()
        return Path(f"/proc/{self.pid}/root{path}")

    def proc(self, name: str) -> str:
        """The text of a file in the /proc folder of the host's process 1."""
        self.check_alive()
        return Path(f"/proc/{self.pid}/{name}").read_text()

    def check_alive(self) -> None:
        if not self.alive:
            raise TestbedError(f"host {self.name!r} is not up")

    def write(self, name: str, text: str, mode: int = 0o644) -> str:
        """Write one of the host's own files; returns its path inside."""
        path = self.path(f"{FILES}/{name}")
        path.touch()
        path.chmod(mode)
        path.write_text(text)
        return f"{FILES}/{name}"

    def popen(
        self, argv: Sequence[str], *, kinds: int = CLONE_ALL, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command inside, as a child of this process.

        A thread enters the namespaces, starts the child, which inherits them, and ends. So there
        is nobody between: the pid, signals and the exit code are the command's own.
        """
        self.check_alive()
        options.setdefault("cwd", os.getcwd())

        def start() -> subprocess.Popen[Any]:
            _check(_libc().unshare(CLONE_FS), f"leave the file system for {self.name!r}")
            _check(_libc().setns(self._pidfd, kinds), f"enter {self.name!r}")
            process = subprocess.Popen(list(argv), **options)
            # Here, where no KeyboardInterrupt can come between: `close` has to know of it.
            self._children.append(process)
            return process

        self._children = [child for child in self._children if child.poll() is None]
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(start).result()

    def run(
        self,
        argv: Sequence[str],
        *,
        kinds: int = CLONE_ALL,
        input: str | None = None,
        timeout_seconds: float = 30.0,
    ) -> str:
        """Run a command of the bed's own, and return what it prints; it must succeed."""
        process = self.popen(
            argv,
            kinds=kinds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            try:
                said: str = process.communicate(input, timeout=timeout_seconds)[0]
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            given = f" with {input!r}" if input else ""
            raise TestbedError(f"{' '.join(argv)}{given} on {self.name!r} failed: {said.strip()}")
        return said

    def kill(self) -> None:
        """End every process inside; `close` waits for it."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        else:  # not yet ready: unshare takes its child with it
            self._process.kill()

    def close(self) -> None:
        self.kill()
        # The kernel ends process 1 of a pid namespace when all others were reaped; those that
        # `popen` started are this process's to reap.
        for child in self._children:
            child.wait(CLOSE_SECONDS)
        self._process.wait(CLOSE_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise TestbedError(f"cannot {what}: {os.strerror(ctypes.get_errno())}")
