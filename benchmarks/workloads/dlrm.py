"""A recommendation model: 26 tables, one id of each in a sample, and dense features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.workloads.workload import Batch, Table, Workload, log_uniform

if TYPE_CHECKING:
    from torch import nn

NUM_TABLES, ROWS, WIDTH, NUM_DENSE, SAMPLES = 26, 40_000, 64, 13, 512


class Recommender(Workload):
    name = "dlrm"
    compute_ms = 10.0
    samples = (SAMPLES, "samples")
    tables = tuple(Table(f"feature{i}", ROWS, WIDTH) for i in range(NUM_TABLES))

    def batch(self, step: int, rank: int) -> Batch:
        random = self.random(step, rank)
        ids = [log_uniform(random, ROWS, SAMPLES) for _ in self.tables]
        dense = random.normal(size=(SAMPLES, NUM_DENSE)).astype(np.float32)
        clicked = (random.random(SAMPLES) < 0.3).astype(np.float32)
        return Batch(ids, [dense, clicked])

    def layers(self) -> nn.Module:
        from benchmarks.workloads.layers import Interaction

        return Interaction(NUM_DENSE, NUM_TABLES, WIDTH)


def make(variant: str) -> Workload:
    if variant:
        raise ValueError(f"workload 'dlrm-{variant}': there is dlrm")
    return Recommender()
