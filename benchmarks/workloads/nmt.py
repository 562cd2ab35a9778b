"""Like a translator: two tables, and more parameters in the layers than in the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.workloads.workload import Batch, Table, Workload, log_uniform

if TYPE_CHECKING:
    from torch import nn

WORDS, WIDTH, NUM_LAYERS, SENTENCES, LENGTH = 8_000, 256, 2, 8, 16


class Translator(Workload):
    name = "nmt"
    compute_ms = 60.0
    samples = (SENTENCES * LENGTH, "words")
    tables = (Table("source", WORDS, WIDTH), Table("target", WORDS, WIDTH))

    def batch(self, step: int, rank: int) -> Batch:
        random = self.random(step, rank)
        source, target = (log_uniform(random, WORDS, (SENTENCES, LENGTH)) for _ in range(2))
        return Batch([source, target], [log_uniform(random, WORDS, (SENTENCES, LENGTH))])

    def layers(self) -> nn.Module:
        from benchmarks.workloads.layers import Translation

        return Translation(WORDS, WIDTH, NUM_LAYERS)


def make(variant: str) -> Workload:
    if variant:
        raise ValueError(f"workload 'nmt-{variant}': there is nmt")
    return Translator()
