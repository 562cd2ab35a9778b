"""In how many parts pushes go: several numbers by themselves, beside the one that a job finds.

    python -m benchmarks partitions --hosts 4

All are up at once and take turns, as engines do.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.contest import FIRST_PORT, WARM_UP_STEPS, set_links, settle
from benchmarks.crew import Crew
from benchmarks.engines import ours
from benchmarks.origin import Origin, Theft, theft_note
from benchmarks.testbed import Testbed
from benchmarks.workloads import by_name
from parallax.observability.journal import read

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16)
MAX_EXCESS = 0.05
"""Over the fastest, which is to be reached."""
_LOGS = Path("runs/logs/partitions")


@dataclass(frozen=True)
class Sweep:
    """A setting's steps: by fixed number of parts, and with the number that was found."""

    workload: str
    num_hosts: int
    rate: str
    fixed: dict[int, list[float]]
    found: int
    tuned: list[float]
    origin: Origin
    stolen: float = 0.0
    """See Contest."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Sweep:
        facts = json.loads(path.read_text())
        facts["fixed"] = {int(number): each for number, each in facts["fixed"].items()}
        return cls(**{**facts, "origin": Origin(**facts["origin"])})

    @property
    def best(self) -> int:
        return min(self.fixed, key=lambda number: median(self.fixed[number]))

    @property
    def excess(self) -> float:
        """By how much the job that found its number is slower than the best one."""
        return median(self.tuned) / median(self.fixed[self.best]) - 1


def sweep(
    workload: str, num_hosts: int, rate: str, repetitions: int, progress: Callable[[str], None]
) -> Sweep:
    about, origin, theft = {"workload": workload, "is_emulated": True}, Origin.now(), Theft()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        bed = stack.enter_context(Testbed(num_hosts, ssh="off"))
        set_links(bed, rate)  # Before the job measures them.
        engines = {0: ours("tuned", run_dir=folder)}
        for number in NUMBERS:
            engines[number] = ours(f"{number} parts", min_partitions=number, replan=False)
        crews = {
            number: stack.enter_context(Crew(bed, engine, about, _LOGS))
            for number, engine in engines.items()
        }
        for place, (number, crew) in enumerate(crews.items()):
            progress(f"starting {engines[number].title}")
            crew.start(FIRST_PORT + place)
        progress("finding the number")
        for crew in crews.values():
            crew.take_turn(WARM_UP_STEPS)
        settle(crews[0], by_name(workload))
        found = _found(folder)
        seconds: dict[int, list[float]] = {number: [] for number in crews}
        for repetition in range(repetitions):
            progress(f"turn {repetition + 1} of {repetitions}")
            for number, crew in crews.items():
                seconds[number].append(crew.take_turn(10).seconds)
    tuned = seconds.pop(0)
    return Sweep(workload, num_hosts, rate, seconds, found, tuned, origin, theft.share())


def _found(folder: str) -> int:
    found = [event["number"] for event in read(folder) if event["kind"] == "partitions"]
    if len(found) != 1:
        raise RuntimeError(f"a job that is let settle finds one number of parts, not {found}")
    return int(found[0])


def table(result: Sweep) -> str:
    lines = [
        f"{result.workload}, {result.num_hosts} hosts × {result.rate}, emulated accelerator",
        "",
        "| parts | step, median [min–max] |",
        "|---:|---:|",
    ]
    for number, seconds in result.fixed.items():
        mark = " ← fastest" if number == result.best else ""
        lines.append(f"| {number} | {_spread(seconds)}{mark} |")
    lines += [
        f"| found while training: {result.found} | {_spread(result.tuned)} |",
        "",
        f"With the number it found, the job takes {1 + result.excess:.3f} of the fastest "
        f"(goal {1 + MAX_EXCESS:.2f}). {result.origin}.{theft_note(result.stolen)}",
    ]
    return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    low, middle, high = (1e3 * each for each in (min(seconds), median(seconds), max(seconds)))
    return f"{middle:.1f} ms [{low:.1f}–{high:.1f}]"
