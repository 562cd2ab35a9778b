"""Real text: the language model of `examples/lm1b.py` on a sample of Wikipedia, to convergence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.workloads.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
MAX_WORDS, WIDTH, HIDDEN, NUM_SAMPLES = 50_000, 256, 128, 1024
WINDOWS, WINDOW, HELD_OUT = 32, 20, 64


class Text(Workload):
    """Windows of the text in one shuffled order; a step takes the next ones for each worker."""

    name = "text"
    samples = (WINDOWS * WINDOW, "words")

    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT / "examples"))

    def read(self) -> int:
        """The number of distinct words; `windows` and `held_out` are there afterwards."""
        import torch
        from text import load_corpus  # of the examples

        corpus = load_corpus(None, MAX_WORDS, ROOT / "runs")
        windows = corpus.ids.unfold(0, WINDOW + 1, WINDOW)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
        self.held_out, self.windows = windows[order[:HELD_OUT]], windows[order[HELD_OUT:]]
        return len(corpus.words)

    def model(self, *, sparse: bool) -> Any:
        import torch
        from lm1b import LanguageModel

        torch.manual_seed(0)
        return LanguageModel(self.read(), WIDTH, HIDDEN, NUM_SAMPLES, sparse=sparse)

    def share(self, step: int, rank: int, num_workers: int) -> Tensor:
        first = (step * num_workers + rank) * WINDOWS
        places = range(first, first + WINDOWS)
        return self.windows[[place % len(self.windows) for place in places]]

    def step(self, trained: nn.Module, model: Any, optimizer: Any, windows: Tensor) -> None:
        """As the example does it."""
        from lm1b import train

        train(trained, model.lstm, optimizer, [(windows,)])


def make(variant: str) -> Workload:
    if variant:
        raise ValueError(f"workload 'text-{variant}': there is text")
    return Text()
