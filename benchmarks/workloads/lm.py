"""A word language model: two large tables, an LSTM, a sampled softmax.

The sizes are those of the first comparison with DDP: words of a Zipf distribution, 32 × 20 of them
a worker, 2,048 candidates. `lm-large` has a vocabulary of 800,000. `lm-adam` trains with AdamW and
weight decay, which change every row in each step, and `lm-adam-fused` with its fused kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.workloads.workload import Batch, Table, Workload, log_uniform

if TYPE_CHECKING:
    from torch import nn

VARIANTS: dict[str, tuple[int, dict[str, object] | None]] = {
    "large": (800_000, None),
    "adam": (200_000, {"weight_decay": 0.01}),
    "adam-fused": (200_000, {"weight_decay": 0.01, "fused": True}),
}
"""Words, and options of AdamW."""
WIDTH, HIDDEN, SEQUENCES, WINDOW, NUM_SAMPLES = 256, 64, 32, 20, 2048


class LanguageModel(Workload):
    compute_ms = 20.0
    samples = (SEQUENCES * WINDOW, "words")

    def __init__(self, name: str, num_words: int, adamw: dict[str, object] | None = None) -> None:
        self.name = name
        self.num_words = num_words
        if adamw is not None:
            self.learning_rate, self.adamw = 0.001, adamw
        self.tables = (
            Table("embedding", num_words, WIDTH),
            Table("softmax", num_words, WIDTH),
        )

    def batch(self, step: int, rank: int) -> Batch:
        random = self.random(step, rank)
        words = log_uniform(random, self.num_words, (SEQUENCES, WINDOW + 1))
        candidates = self._candidates(random)
        looked_up = np.concatenate([words[:, 1:].reshape(-1), candidates])
        return Batch([np.ascontiguousarray(words[:, :-1]), looked_up], [])

    def _candidates(self, random: np.random.Generator) -> np.ndarray:
        """Distinct words, the frequent ones more likely."""
        drawn = log_uniform(random, self.num_words, 8 * NUM_SAMPLES)
        _, first = np.unique(drawn, return_index=True)
        return drawn[np.sort(first)[:NUM_SAMPLES]]

    def layers(self) -> nn.Module:
        from benchmarks.workloads.layers import SampledWords

        return SampledWords(WIDTH, HIDDEN, SEQUENCES * WINDOW)


def make(variant: str) -> Workload:
    if not variant:
        return LanguageModel("lm", 200_000)
    if variant not in VARIANTS:
        known = ", ".join(f"lm-{each}" for each in VARIANTS)
        raise ValueError(f"workload 'lm-{variant}': there are lm, {known}")
    num_words, adamw = VARIANTS[variant]
    return LanguageModel(f"lm-{variant}", num_words, adamw)
