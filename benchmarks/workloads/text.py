"""Real text: the language model of `examples/lm1b.py` on a sample of Wikipedia, to convergence."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.workloads.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[2]
MAX_WORDS, WIDTH, HIDDEN, NUM_SAMPLES = 50_000, 256, 128, 1024
WINDOWS, WINDOW, HELD_OUT = 32, 20, 64


class Text(Workload):
    """Windows of the text in one shuffled order; a step takes the next ones for each worker."""

    name = "text"

    windows: Tensor
    held_out: Tensor

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

    def loader(self) -> DataLoader[Any]:
        """A worker's batches if it is the only one; in order, as they were shuffled by `read`."""
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        # With a generator of its own it draws nothing from that of the candidates.
        draws = torch.Generator()
        return DataLoader(TensorDataset(self.windows), WINDOWS, drop_last=True, generator=draws)

    def batches(self, rank: int, num_workers: int) -> Iterator[Any]:
        """What `session.shard(loader)` gives a worker, cut by hand."""
        while True:
            for step in range(len(self.windows) // (WINDOWS * num_workers)):
                first = (step * num_workers + rank) * WINDOWS
                yield [self.windows[first : first + WINDOWS]]

    def step(self, trained: nn.Module, model: Any, optimizer: Any, batch: Any) -> None:
        """As the example does it."""
        from lm1b import train

        train(trained, model.lstm, optimizer, [batch])


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def make(variant: str) -> Workload:
    return Text()
