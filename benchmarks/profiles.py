"""Where the processors' time of a step goes, by engine.

    python -m benchmarks profile dlrm --hosts 4 --rate 1gbit

Linux's `perf` samples all processors while an engine has its turn. What it finds is told by kind of
code, in milliseconds of a processor for each step and worker.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contest import FIRST_PORT, WARM_UP_STEPS, set_links, settle
from benchmarks.crew import Crew
from benchmarks.engines import ENGINES
from benchmarks.testbed import Testbed
from benchmarks.workloads import by_name

_LOGS = Path("runs/logs/profile")
_HERTZ = 999
IDLE = "idle"
KINDS: dict[str, tuple[str, ...]] = {
    "Python": ("libpython", "python3"),
    "torch": ("libtorch", "libc10", "libgomp", "libmkl", "fbgemm"),
    "C library": ("libc.so", "libstdc++", "ld-linux"),
    "kernel": ("[kernel",),
}
"""Of code, by the beginnings of what it is in; all else is `other`."""
COLUMNS = (*KINDS, "other", IDLE)


@dataclass(frozen=True)
class Profile:
    """An engine's step."""

    title: str
    seconds: float
    num_workers: int
    shares: dict[str, float]
    """Of all processors' time, by kind."""
    num_processors: int

    def milliseconds(self, kind: str) -> float:
        """Of a processor, for a worker and step; idle ones are counted for all workers alike."""
        all_seconds = self.seconds * self.num_processors
        return 1e3 * self.shares.get(kind, 0.0) * all_seconds / self.num_workers


def missing() -> str | None:
    """Why there can be no profile here, if so."""
    if shutil.which("perf") is None:
        return "it needs Linux's perf (Debian: apt install linux-perf)"
    return None


def profile(
    workload: str,
    num_hosts: int,
    rate: str,
    engines: Sequence[str],
    num_steps: int,
    progress: Callable[[str], None],
) -> list[Profile]:
    about = {"workload": workload, "is_emulated": True}
    found = []
    with ExitStack() as stack:
        bed = stack.enter_context(Testbed(num_hosts, ssh="off"))
        for place, name in enumerate(engines):
            engine = ENGINES[name]
            progress(f"starting {engine.title}")
            with Crew(bed, engine, about, _LOGS) as crew:
                crew.start(FIRST_PORT + place)
                set_links(bed, rate)
                progress(f"{engine.title} warms up")
                crew.take_turn(WARM_UP_STEPS)
                settle(crew, by_name(workload))
                progress(f"{engine.title} is sampled")
                found.append(_sampled(crew, num_hosts, num_steps))
    return found


def _sampled(crew: Crew, num_workers: int, num_steps: int) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/perf.data"
        command = ["perf", "record", "-a", "-F", str(_HERTZ), "-e", "cpu-clock", "-o", path]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as recorder:
            try:
                turn = crew.take_turn(num_steps)
            finally:
                recorder.send_signal(signal.SIGINT)
        if not Path(path).exists():
            raise SystemExit("profile: `perf record -a` failed; it needs root")
        shown = ["perf", "report", "-i", path, "--stdio", "-F", "overhead,dso,symbol", "-t", ";"]
        done = subprocess.run(shown, capture_output=True, text=True, check=True)
    shares, processors = shares_of(done.stdout), os.cpu_count() or 1
    return Profile(crew.engine.title, turn.seconds, num_workers, shares, processors)


def shares_of(report: str) -> dict[str, float]:
    """Lines of `perf report`, as in ` 5.23%;libpython3.11.so.1.0;[.] _PyEval_Eval…`, by kind."""
    shares: dict[str, float] = {}
    for line in report.splitlines():
        percent, *rest = (part.strip() for part in line.split(";", 2))
        if len(rest) != 2 or not percent.endswith("%"):
            continue
        kind = _kind(*rest)
        shares[kind] = shares.get(kind, 0.0) + float(percent[:-1]) / 100
    return shares


def _kind(place: str, symbol: str) -> str:
    if place.startswith("[kernel") and ("halt" in symbol or "idle" in symbol):
        return IDLE
    return next((kind for kind, begins in KINDS.items() if place.startswith(begins)), "other")


def table(workload: str, rate: str, profiles: Sequence[Profile]) -> str:
    first = profiles[0]
    lines = [
        f"{workload}, {first.num_workers} hosts × {rate}, emulated accelerator, "
        f"{first.num_processors} processors; ms of a processor for a worker and step:",
        "",
        f"| engine | step | {' | '.join(COLUMNS)} |",
        f"|---|---:|{'---:|' * len(COLUMNS)}",
    ]
    for each in profiles:
        cells = [f"{each.milliseconds(kind):,.1f}" for kind in COLUMNS]
        lines.append(f"| {each.title} | {1e3 * each.seconds:,.1f} ms | {' | '.join(cells)} |")
    return "\n".join(lines)
