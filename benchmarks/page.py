"""Results → a page with tables and pictures, to keep."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks import convergence, partitions, predictions
from benchmarks.contest import Contest
from benchmarks.plots import draw, draw_convergence
from benchmarks.report import report
from benchmarks.results import Results

INTRODUCTION = """# Benchmarks

Parallax beside what people would use instead, on the same model, data, batches and hosts. The
hosts are network namespaces of one machine with shaped links (`benchmarks/testbed`). All engines
of a table are up together and train in turns, A B C A B C …, each stopped while another trains
(where memory does not suffice for all, in several sittings with Parallax in each, as told below the
table); `Parallax = 1` is the median of the ratios to Parallax's turns just before and after, and
the only figure that means something on another machine. *Emulated accelerator* means that sleeps
stand for the arithmetic of the layers, so that eight workers can share two cores; lookups,
gradients, exchange and updates are real. *Limit* is the larger of computing alone (`no exchange`)
and the engine's own bytes ÷ the link's rate; bytes are those that the busiest host's interface
counted, headers included. TensorFlow's parameter server is asynchronous: its step is the time for
one batch of every worker.

Under each table the first worker's own clock: forward, backward, update and batch add up to the
step; *batch* is what it takes to get the next one, which for Parallax is when rows arrive that the
step before has changed. Of Parallax's, *rows* and *dense* are the waits for exchanges of rows and
of dense gradients, *headers* those for the small messages before them, in which a worker that is
early also waits for the others. What is still on its way when a turn ends is waited for and counted
in it. With real compute every synchronous engine has the same loss after the same steps; one that
has not is marked. TorchRec's deduplication has no kernel for CPUs, so an id that a batch repeats
travels as often. CPU is not told of TensorFlow, whose servers are processes of their own.

The split of a step (a picture, and in the goals) is told in the same way for all, because most
engines tell nothing of themselves: *compute* as without exchange, *update* by the engine's clock if
it has one, *exchange* what its bytes take on the link, *wait* all the rest.
[profiles.md](profiles.md) has in which code the processors spend a step, as `python -m benchmarks
profile` samples it.

    make peers          # a virtualenv for each; those without one are left out
    make bench          # more than two hours
    python -m benchmarks report docs/benchmarks/records --out docs/benchmarks

`records` has all turns that these tables come from.
"""


def write(results: Results, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    contests, outcome = results.contests, results.outcome
    parts = [INTRODUCTION, _machines(contests)]
    parts += [*(_shown(path) for path in draw(contests, folder)), report(contests)]
    if outcome is not None:
        picture = draw_convergence(outcome, folder)
        parts += ["## Convergence", convergence.table(outcome), _shown(picture)]
    if results.forecasts:
        parts += ["## Forecasts", predictions.table(results.forecasts)]
    if results.sweep is not None:
        parts += ["## Pushes in parts", partitions.table(results.sweep)]
    page = folder / "README.md"
    page.write_text("\n\n".join(part.strip() for part in parts if part) + "\n")
    return page


def _machines(contests: list[Contest]) -> str:
    """A warning, if there are several."""
    numbers = Counter(contest.machine for contest in contests)
    if len(numbers) < 2:
        return ""
    named = "; ".join(f"{number} on {machine}" for machine, number in numbers.most_common())
    return (
        f"Settings were measured on {len(numbers)} machines, as told below each table: {named}. "
        "What is told in seconds or by the second cannot be compared between them, nor can ends of "
        "a plot's line that are of different ones."
    )


def _shown(picture: Path) -> str:
    return f"![{picture.stem}]({picture.name})"
