"""One table, of which a step touches a given part: from a few rows to nearly all.

Ids are drawn without repetition and evenly, so that `sparsity-5` touches exactly 5% of the rows on
every worker, and workers share few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.workloads.workload import Batch, Table, Workload

if TYPE_CHECKING:
    from torch import nn

ROWS, WIDTH = 20_000, 256


class Touched(Workload):
    compute_ms = 20.0
    tables = (Table("table", ROWS, WIDTH),)

    def __init__(self, percent: float) -> None:
        self.name = f"sparsity-{percent:g}"
        self.samples = (max(round(ROWS * percent / 100), 1), "rows")

    def batch(self, step: int, rank: int) -> Batch:
        ids = self.random(step, rank).permutation(ROWS)[: self.samples[0]]
        return Batch([ids], [])

    def layers(self) -> nn.Module:
        from benchmarks.workloads.layers import Square

        return Square(WIDTH)


def make(variant: str) -> Workload:
    try:
        percent = float(variant)
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise ValueError(f"workload 'sparsity-{variant}': take sparsity-0.1 to sparsity-100")
    return Touched(percent)
