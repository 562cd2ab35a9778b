"""A recommendation model: 26 tables, one id of each in a sample, and dense features.

`dlrm-adam` trains with Adam, which changes every row in each step, and `dlrm-adam-fused` with its
fused kernel. Their optimizer is AdamW without weight decay, which is the same as Adam.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.workloads.workload import Batch, Table, Workload, log_uniform

if TYPE_CHECKING:
    from torch import nn

NUM_TABLES, ROWS, WIDTH, NUM_DENSE, SAMPLES = 26, 40_000, 64, 13, 512
VARIANTS: dict[str, dict[str, object]] = {
    "adam": {"weight_decay": 0.0},
    "adam-fused": {"weight_decay": 0.0, "fused": True},
}
"""Options of AdamW."""


class Recommender(Workload):
    compute_ms = 10.0
    samples = (SAMPLES, "samples")
    tables = tuple(Table(f"feature{i}", ROWS, WIDTH) for i in range(NUM_TABLES))

    def __init__(self, name: str, adamw: dict[str, object] | None = None) -> None:
        self.name = name
        if adamw is not None:
            self.learning_rate, self.adamw = 0.001, adamw

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
    if not variant:
        return Recommender("dlrm")
    if variant not in VARIANTS:
        known = ", ".join(f"dlrm-{each}" for each in VARIANTS)
        raise ValueError(f"workload 'dlrm-{variant}': there are dlrm, {known}")
    return Recommender(f"dlrm-{variant}", VARIANTS[variant])
