"""One small table and a small network: what an engine costs where there is little to do.

A step's bytes and arithmetic take next to no time, so its length is that of the engine's own work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.workloads.workload import Batch, Table, Workload, log_uniform

if TYPE_CHECKING:
    from torch import nn

ROWS, WIDTH, SAMPLES, IDS_PER_SAMPLE = 50_000, 32, 128, 8


class Small(Workload):
    name = "small"
    compute_ms = 1.0
    samples = (SAMPLES, "samples")
    tables = (Table("table", ROWS, WIDTH),)

    def batch(self, step: int, rank: int) -> Batch:
        random = self.random(step, rank)
        ids = log_uniform(random, ROWS, (SAMPLES, IDS_PER_SAMPLE))
        return Batch([ids], [(random.random(SAMPLES) < 0.3).astype(np.float32)])

    def layers(self) -> nn.Module:
        from benchmarks.workloads.layers import Pooled

        return Pooled(WIDTH)


def make(variant: str) -> Workload:
    if variant:
        raise ValueError(f"workload 'small-{variant}': there is small")
    return Small()
