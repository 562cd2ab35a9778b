"""The free memory of this machine or GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, workers_per_host: int) -> float:
    """Return what each worker of this host can still allocate; infinite where it is unknown."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    try:
        return available_bytes() / workers_per_host
    except OSError:
        return math.inf


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Return the available memory, caches included, within the limits of the container."""
    return min([_of_machine(proc), *_of_groups(proc, cgroups)])


def _of_machine(proc: Path) -> float:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, kilobytes = line.partition(":")
        if name == "MemAvailable":
            return 1024.0 * int(kilobytes.split()[0])
    raise OSError(f"{proc / 'meminfo'} does not say what is available")


def _of_groups(proc: Path, cgroups: Path) -> list[float]:
    """Return limit − use of this process's control groups and those above, of either version."""
    found = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top = cgroups / kinds if kinds else cgroups
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            found += _left(group, *(_FIRST_VERSION if kinds else _SECOND_VERSION))
            group = group.parent
    return found


_FIRST_VERSION = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_SECOND_VERSION = ("memory.max", "memory.current", "")
"""For control groups: the files of limit and use, and the prefix of sums over child groups."""


def _left(group: Path, limit: str, used: str, prefix: str) -> list[float]:
    path = group / limit
    if not path.exists() or (text := path.read_text().strip()) == "max":
        return []
    left = int(text) - int((group / used).read_text()) + _cached(group / "memory.stat", prefix)
    return [float(left)]


def _cached(stat: Path, prefix: str) -> int:
    """Return the size of cached files, which the kernel can free."""
    if not stat.exists():
        return 0
    kinds = (f"{prefix}active_file", f"{prefix}inactive_file")
    lines = (line.split() for line in stat.read_text().splitlines())
    return sum(int(size) for name, size in lines if name in kinds)
