"""The 2019 paper's models on its cluster: what it measured, and what `forecast` makes of them.

Eight machines with six GPUs each, 100 Gbit/s. The links' rate is not what the systems of 2019
reached over gRPC; two rates are taken from two of the paper's figures (the hybrid's at one and at
eight machines), everything else is the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallax.planning.cost import Cluster, Link, Touched
from parallax.planning.forecast import Architecture, Forecast, Table, Work, scaling

NUM_MACHINES, GPUS = (1, 2, 4, 8), 6
CLUSTER = Cluster(
    num_hosts=8,
    workers_per_host=GPUS,
    between=Link(0.85e9, 1e-4),
    within=Link(4.0e9, 1e-5),
)
"""As the hybrid's LM at eight machines and at one tells."""

_WORDS, _WIDTH = 793_470, 512 * 4
_LM_BATCH = 128 * 20
LM = Work(
    # Distinct rows of 2,560 words, and of those with 8,192 candidates, log-uniform; growth is that
    # from one worker to the six of a machine.
    tables=(
        Table("embedding", _WORDS * _WIDTH, _WIDTH, Touched(1651, growth=0.873)),
        Table("softmax", _WORDS * _WIDTH, _WIDTH, Touched(9248, growth=0.830)),
    ),
    dense_bytes=4 * 9.4e6,
    compute_seconds=_LM_BATCH / (274e3 / 9.4),
    samples=_LM_BATCH,
)
_NMT_ROWS, _NMT_WIDTH, _NMT_BATCH = 36_573, 1024 * 4, 128 * 25
NMT = Work(
    tables=tuple(
        Table(name, _NMT_ROWS * _NMT_WIDTH, _NMT_WIDTH, Touched(0.21 * _NMT_ROWS, growth=0.7))
        for name in ("encoder", "decoder")
    ),
    dense_bytes=4 * 94.1e6,
    compute_seconds=_NMT_BATCH / (204e3 / 18.4),
    samples=_NMT_BATCH,
)
RESNET = Work((), dense_bytes=4 * 23.8e6, compute_seconds=64 / 200, samples=64)
"""Of NMT and ResNet-50 the sizes, the share of rows and the speed of one GPU are recalled."""


@dataclass(frozen=True)
class Measured:
    """Thousands of words a second that the paper shows, by number of machines."""

    architecture: Architecture
    by: str
    words: dict[int, float]


LM_FIGURES = (
    Measured(Architecture.ALL_REDUCE, "Horovod", {1: 68, 2: 46, 4: 42, 8: 39}),
    Measured(Architecture.SHARDED, "TensorFlow PS", {1: 88, 2: 127, 4: 147, 8: 101}),
    Measured(Architecture.HYBRID, "Parallax", {1: 88, 2: 150, 4: 250, 8: 277}),
)
NMT_FIGURES = (
    Measured(Architecture.ALL_REDUCE, "AllReduce", {8: 68.3}),
    Measured(Architecture.SHARDED, "optimised PS", {8: 116}),
    Measured(Architecture.HYBRID, "hybrid", {8: 204}),
)
"""Recalled."""


def forecasts(work: Work) -> dict[Architecture, list[Forecast]]:
    return scaling(work, CLUSTER, NUM_MACHINES)


def page() -> str:
    """Both side by side, as Markdown."""
    return "\n".join(
        [
            "| | | 1 machine | 2 | 4 | 8 |",
            "|---|---|---|---|---|---|",
            *_lines("LM", LM, LM_FIGURES),
            *_lines("NMT", NMT, NMT_FIGURES),
            *_lines("ResNet-50 (images)", RESNET, ()),
        ]
    )


def _lines(title: str, work: Work, figures: tuple[Measured, ...]) -> Iterator[str]:
    found = forecasts(work)
    for architecture, steps in found.items():
        cells = [f"{each.throughput / 1e3:.0f}" for each in steps]
        if work is RESNET:
            cells = [f"{each.throughput / 1e3:.1f}" for each in steps]
        yield f"| {title}, {architecture.value} | forecast | {' | '.join(cells)} |"
        for figure in figures:
            if figure.architecture is architecture:
                told = [f"{figure.words[n]:g}" if n in figure.words else "" for n in NUM_MACHINES]
                yield f"| | {figure.by} | {' | '.join(told)} |"


if __name__ == "__main__":
    print(page())
