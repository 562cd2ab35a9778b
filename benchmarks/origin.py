"""Where figures come from: the day, the machine and the sources."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.crew import ROOT


@dataclass(frozen=True)
class Origin:
    """Of a measurement that begins."""

    started: str
    machine: str
    commit: str

    @classmethod
    def now(cls) -> Origin:
        return cls(now(), machine(), commit())

    def __str__(self) -> str:
        return f"{self.started} UTC, {self.machine}, Parallax at {self.commit}"


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())


def machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    system = f"{platform.system()} {platform.release()}"
    return f"{os.cpu_count()} × {_processor()}, {memory:.0f} GiB, {system}"


class Theft:
    """What others on the same hardware take of this machine's processors, from now on."""

    def __init__(self) -> None:
        self._before = _processor_time()

    def share(self) -> float:
        stolen, total = (b - a for a, b in zip(self._before, _processor_time(), strict=True))
        return stolen / total if total else 0.0


def _processor_time() -> tuple[float, float]:
    """Of all processors since the machine was started: stolen, and all; in ticks."""
    with Path("/proc/stat").open() as lines:
        ticks = [float(each) for each in lines.readline().split()[1:9]]
    return ticks[7], sum(ticks)


def theft_note(share: float) -> str:
    """A sentence, if it was enough to matter."""
    if share < _LITTLE:
        return ""
    return f" Others on the same hardware had {share:.0%} of the processors' time."


_LITTLE = 0.02


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, model = line.partition(":")
        if name.strip() == "model name":
            return model.strip()
    return platform.machine()


def commit(root: Path = ROOT) -> str:
    """Of the sources that train, as far as git knows them."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
