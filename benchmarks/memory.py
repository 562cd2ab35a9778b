"""How much memory there is for workers."""

from __future__ import annotations

from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """What the kernel could give away, caches included; in a container no more than it may have."""
    return min([_of_machine(proc), *_of_groups(proc, cgroups)])


def _of_machine(proc: Path) -> float:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, kilobytes = line.partition(":")
        if name == "MemAvailable":
            return 1024.0 * int(kilobytes.split()[0])
    raise OSError(f"{proc / 'meminfo'} does not say what is available")


def _of_groups(proc: Path, cgroups: Path) -> list[float]:
    """Of this process's groups and those above them: limit − use, whichever version there is."""
    found = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top = cgroups / kinds if kinds else cgroups
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        names = names if kinds else ("memory.max", "memory.current")
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            found += _left(group / names[0], group / names[1])
            group = group.parent
    return found


def _left(limit: Path, used: Path) -> list[float]:
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return []
    return [float(int(text) - int(used.read_text()))]
