"""CPU quotas: cgroups of version 1 or 2 under a folder whose name says which process made it.

    parallax-testbed-PID-START-COUNT/       START as in /proc/PID/stat: pids are given out again
        HOST/                               has the host's quota
            rest/                           the host's processes
            worker-PID/                     a process with a quota of its own

Groups are the only thing that outlives a crash ([Note: nothing outside]). `sweep` removes those
whose maker is gone. It only removes folders, which the kernel refuses while a process is in them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.namespace import TestbedError

PREFIX = "parallax-testbed"
CLOSE_SECONDS = 10.0
_count = itertools.count()


@dataclass(frozen=True)
class Controller:
    """Where the machine has its cpu controller, and how a quota is written there."""

    root: Path
    version: int

    @staticmethod
    def find() -> Controller:
        for line in Path("/proc/mounts").read_text().splitlines():
            _, folder, kind, options = line.split()[:4]
            if kind == "cgroup" and "cpu" in options.split(","):
                return Controller(Path(folder), 1)
            if kind == "cgroup2" and "cpu" in _words(Path(folder, "cgroup.controllers")):
                return Controller(Path(folder), 2)
        raise TestbedError("CPU quotas need a cgroup with the cpu controller, and none is mounted")

    def check(self) -> None:
        control = self.root / "cgroup.subtree_control"
        if self.version == 2 and "cpu" not in _words(control):
            raise TestbedError(
                f"CPU quotas need 'cpu' in {control}, which is not this test bed's to change; "
                f"as root: echo +cpu > {control}"
            )

    def make(self, group: Path, *, inner: bool) -> None:
        """Make a group; one with groups in it (`inner`) can have no processes in version 2."""
        group.mkdir()
        if inner and self.version == 2:
            (group / "cgroup.subtree_control").write_text("+cpu")

    def limit(self, group: Path, cpus: float) -> None:
        quota, period = microseconds(cpus)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))


class Quotas:
    """The groups of one test bed, made when first needed."""

    def __init__(self, controller: Controller | None = None) -> None:
        self._controller = controller
        self._hosts: dict[str, float] = {}
        self.group: Path | None = None

    def add_host(self, host: str, cpus: float | None) -> None:
        """A group for a host; without `cpus` it only holds workers' groups."""
        controller = self._controller = self._controller or Controller.find()
        if self.group is None:
            controller.check()
            self.group = controller.root / f"{PREFIX}-{owner_name(os.getpid())}-{next(_count)}"
            controller.make(self.group, inner=True)
        controller.make(self.group / host, inner=True)
        if cpus is not None:
            controller.limit(self.group / host, cpus)
        controller.make(self.group / host / "rest", inner=False)
        self._hosts[host] = float("inf") if cpus is None else cpus

    def entrance(self, host: str) -> Path | None:
        """The file through which a process of the host joins its group; None if it has none."""
        if self.group is None or host not in self._hosts:
            return None
        return self.group / host / "rest" / "cgroup.procs"

    def limit(self, host: str, pid: int, cpus: float) -> None:
        """A quota of its own for a process and those that it will start."""
        microseconds(cpus)
        if host not in self._hosts:
            self.add_host(host, None)
        if cpus > self._hosts[host]:
            raise ValueError(f"cpus={cpus} is more than the {self._hosts[host]} of host {host!r}")
        assert self.group is not None
        assert self._controller is not None
        group = self.group / host / f"worker-{pid}"
        if not group.exists():
            self._controller.make(group, inner=False)
        self._controller.limit(group, cpus)
        (group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        if self.group is not None:
            _remove(self.group, CLOSE_SECONDS)
            self.group = None
            self._hosts.clear()


def microseconds(cpus: float) -> tuple[int, int]:
    """Quota and period. Short periods are smooth; the kernel wants at least 1 ms of quota."""
    if not 0.01 <= cpus <= 1024:
        raise ValueError(f"cpus={cpus}: a quota is from 0.01 to 1024 processors")
    period = 10_000 if cpus >= 0.1 else 100_000
    return round(cpus * period), period


def owner_name(pid: int) -> str:
    """PID-START of a process; raises FileNotFoundError if it is gone."""
    after_command = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{pid}-{after_command[19]}"


def sweep(root: Path | None = None) -> list[Path]:
    """Remove the groups of test beds whose maker is gone, and return them."""
    swept = []
    for group in (root or Controller.find().root).glob(f"{PREFIX}-*"):
        named = re.fullmatch(rf"{PREFIX}-((\d+)-\d+)-\d+", group.name)
        if named is None or _is_alive(int(named[2]), named[1]):
            continue
        with contextlib.suppress(OSError):  # still in use, or somebody else swept it
            _remove(group, 0.0)
            swept.append(group)
    return swept


def _is_alive(pid: int, name: str) -> bool:
    try:
        return owner_name(pid) == name
    except (FileNotFoundError, ProcessLookupError):
        return False


def _remove(group: Path, timeout_seconds: float) -> None:
    """Remove a group and those in it; they may be busy for a moment after their processes ended."""
    for inner in [path for path in group.iterdir() if path.is_dir()]:
        _remove(inner, timeout_seconds)
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
