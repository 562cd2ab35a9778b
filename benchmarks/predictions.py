"""What a run's own forecast says of its steps, beside what they took.

    python -m benchmarks predict --workloads lm,dlrm

Parallax alone, on hosts whose links have their rate before the workers measure them. The last lines
of a run's folder are those of a job that is killed, as any may be.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contest import FIRST_PORT, set_links, settle
from benchmarks.crew import Crew
from benchmarks.engines import ours
from benchmarks.origin import Origin, Theft, theft_note
from benchmarks.testbed import Testbed
from benchmarks.workloads import by_name
from parallax.launch.outlook import Run

WORKLOADS, HOSTS, RATE = ("lm", "nmt", "dlrm", "resnet"), (2, 4, 8), "200mbit"
_WARM_UP_STEPS, _NUM_STEPS = 26, 100
"""Of the latter one is a step in which workers look at the plan together, as in any long run: that
is after 105 steps, or after 305 where tables have first found their way."""
MAX_ERROR, MAX_BYTES_ERROR, MAX_PLANNING = 0.2, 0.05, 0.01
"""What is to be reached: of a step's time, of its bytes, and of the step for planning."""


@dataclass(frozen=True)
class Prediction:
    """A setting's step and bytes, as foretold and as seen, and what planning takes of the step."""

    workload: str
    num_hosts: int
    predicted_seconds: float
    seconds: float
    predicted_bytes: float
    seen_bytes: float
    planning_seconds: float
    origin: Origin
    stolen: float = 0.0
    """See Contest."""

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.seconds - 1

    @property
    def bytes_error(self) -> float:
        return self.predicted_bytes / self.seen_bytes - 1

    @property
    def planning(self) -> float:
        return self.planning_seconds / self.seconds


def keep(found: Prediction, path: Path) -> None:
    """In the place of what was kept for its setting."""
    others = [each for each in kept(path) if _setting(each) != _setting(found)]
    everything = sorted([*others, found], key=_setting)
    path.write_text(json.dumps([asdict(each) for each in everything], indent=1))


def kept(path: Path) -> list[Prediction]:
    facts = json.loads(path.read_text()) if path.exists() else []
    return [Prediction(**{**each, "origin": Origin(**each["origin"])}) for each in facts]


def _setting(found: Prediction) -> tuple[int, int]:
    return WORKLOADS.index(found.workload), found.num_hosts


def predict(workload: str, num_hosts: int) -> Prediction:
    origin, theft = Origin.now(), Theft()
    with tempfile.TemporaryDirectory() as folder, Testbed(num_hosts, ssh="off") as bed:
        set_links(bed, RATE)
        engine = ours(run_dir=folder)
        engine.options["clocked"] = True
        about = {"workload": workload, "is_emulated": True}
        with Crew(bed, engine, about) as crew:
            crew.start(FIRST_PORT)
            crew.take_turn(_WARM_UP_STEPS)
            settle(crew, by_name(workload))
            turn = crew.take_turn(_NUM_STEPS)
        run = Run.of(folder)
    assert run.mean is not None
    seen = run.plan.observed(run.mean, run.cluster)
    assert seen.predicted_seconds is not None
    assert seen.seconds_per_step is not None
    lines = [line for line in seen.parameters if line.bytes_per_step is not None]
    return Prediction(
        workload,
        num_hosts,
        seen.predicted_seconds,
        seen.seconds_per_step,
        sum(line.predicted_bytes or 0.0 for line in lines),
        sum(line.bytes_per_step or 0.0 for line in lines),
        turn.spans["planning"],
        origin,
        theft.share(),
    )


HEAD = (
    "| | hosts | step | predicted | | bytes sent | predicted | | planning and ledger |\n"
    f"|---|{'---:|' * 8}"
)


def line(found: Prediction) -> str:
    return (
        f"| `{found.workload}` | {found.num_hosts} | {1e3 * found.seconds:.1f} ms "
        f"| {1e3 * found.predicted_seconds:.1f} ms "
        f"| {found.error:+.0%} "
        f"| {found.seen_bytes / 1e6:.2f} MB | {found.predicted_bytes / 1e6:.2f} MB "
        f"| {found.bytes_error:+.1%} "
        f"| {found.planning:.2%} |"
    )


def table(found: Sequence[Prediction]) -> str:
    worst = max(abs(each.error) for each in found)
    worst_bytes = max(abs(each.bytes_error) for each in found)
    origins = "\n".join(f"- {each}" for each in dict.fromkeys(str(f.origin) for f in found))
    return (
        f"Steps of Parallax as a run's own plan foretells them, emulated compute, hosts × {RATE} "
        f"(`python -m benchmarks predict`):\n\n"
        + "\n".join([HEAD, *map(line, found)])
        + f"\n\nSteps are at most {worst:.0%} off (goal {MAX_ERROR:.0%}), bytes "
        f"{worst_bytes:.1%} ({MAX_BYTES_ERROR:.0%}); planning, measuring and the ledger take at "
        f"most {max(each.planning for each in found):.2%} of a step ({MAX_PLANNING:.0%}), by the "
        "first worker's clock, which also runs while others have the cores."
        f"{theft_note(max(each.stolen for each in found))}\n\n" + origins
    )
