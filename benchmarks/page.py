"""Results → a page with tables and pictures, to keep."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contest import Contest
from benchmarks.plots import draw
from benchmarks.report import report

INTRODUCTION = """# Benchmarks

Parallax beside what people would use instead, on the same model, data, batches and hosts. The
hosts are network namespaces of one machine with shaped links (`benchmarks/testbed`). All engines
of a table are up together and train in turns, A B C A B C …, each stopped while another trains;
`Parallax = 1` is the median of the ratios of neighbouring turns, and the only figure that means
something on another machine. *Emulated accelerator* means that a sleep stands for the arithmetic
of the layers, so that eight workers can share two cores; lookups, gradients, exchange and updates
are real. *Limit* is the larger of computing alone (`no exchange`) and the engine's own bytes ÷
the link's rate; bytes are those that the busiest host's interface counted, headers included.
TensorFlow's parameter server is asynchronous: its step is the time for one batch of every worker.

    make bench          # all of it; `make peers` first, or the peers are left out
    python -m benchmarks report --out docs/benchmarks
"""


def write(contests: list[Contest], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(contests, folder)
    shown = "\n\n".join(f"![{path.stem}]({path.name})" for path in pictures)
    page = folder / "README.md"
    page.write_text(f"{INTRODUCTION}\n{shown}\n\n{report(contests)}")
    return page
