"""What a run's own forecast says of its steps, beside what they took.

    python -m benchmarks predict --workloads lm,dlrm

Parallax alone, on hosts whose links have their rate before the workers measure them. The last lines
of a run's folder are those of a job that is killed, as any may be.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from benchmarks.contest import FIRST_PORT, set_links, settle
from benchmarks.crew import Crew
from benchmarks.engines import ours
from benchmarks.testbed import Testbed
from benchmarks.workloads import by_name
from parallax.launch.outlook import Run

WORKLOADS, HOSTS, RATE = ("lm", "nmt", "dlrm", "resnet"), (2, 4, 8), "200mbit"
_WARM_UP_STEPS, _NUM_STEPS = 6, 40


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


def predict(workload: str, num_hosts: int) -> Prediction:
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
    )


HEAD = (
    "| | hosts | step | predicted | | bytes sent | predicted | | planning and ledger |\n"
    f"|---|{'---:|' * 8}"
)


def line(found: Prediction) -> str:
    return (
        f"| `{found.workload}` | {found.num_hosts} | {1e3 * found.seconds:.1f} ms "
        f"| {1e3 * found.predicted_seconds:.1f} ms "
        f"| {found.predicted_seconds / found.seconds - 1:+.0%} "
        f"| {found.seen_bytes / 1e6:.2f} MB | {found.predicted_bytes / 1e6:.2f} MB "
        f"| {found.predicted_bytes / found.seen_bytes - 1:+.1%} "
        f"| {found.planning_seconds / found.seconds:.2%} |"
    )
