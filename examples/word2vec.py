"""Word vectors: skip-gram with negative sampling, trained data-parallel.

    parallax run -n 2 examples/word2vec.py --steps 2000

`python examples/word2vec.py` trains them on one device. Both tables are sharded by Parallax; only
the rows of a batch's words and of its negatives travel. Frequent words are subsampled, and the
negatives of a step are shared by its batch. Ends with the mean rank of the words that really stand
around a held-out word, among all words, beside that at the start, when only the words' frequencies
were known; and with the nearest neighbours of a few words. The Wikipedia sample is small for word
vectors: neighbours make sense after 600 steps, but the mean rank, which rare words rule, is then
still behind that of the frequencies.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loop import steps, write_result
from text import Corpus, load_corpus
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import parallax


class SkipGram(nn.Module):
    """A table of words as centres and one of words as neighbours of a centre."""

    def __init__(self, counts: Tensor, width: int, negatives: int, pool: int) -> None:
        super().__init__()
        self.negatives, self.pool = negatives, pool
        self.centres = nn.Embedding(len(counts), width)
        self.neighbours = nn.Embedding(len(counts), width)
        self.register_buffer("chance", counts**0.75, persistent=False)
        nn.init.uniform_(self.centres.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.neighbours.weight)

    def forward(self, windows: Tensor) -> Tensor:
        """The loss of a pair; a pool drawn for the batch stands for each pair's `negatives`."""
        centre, around = split(windows)
        drawn = torch.multinomial(self.chance, self.pool, replacement=True)
        # One lookup for neighbours and negatives: a row that is both travels once.
        rows = self.neighbours(torch.cat([around.flatten(), drawn]))
        true, false = rows[: around.numel()].view(*around.shape, -1), rows[around.numel() :]
        states = self.centres(centre)
        found = F.logsigmoid((true * states[:, None]).sum(2)).mean()
        refused = F.logsigmoid(-states @ false.t()).mean()
        return -found - self.negatives * refused

    @torch.no_grad()
    def mean_rank(self, windows: Tensor, chunk_size: int = 8192) -> float:
        """How many words the model finds more likely than the true neighbour, on average.

        A trained score is log p(word | centre) - log q(word) but for a constant, where q is the
        negatives' distribution.
        """
        centre, around = split(windows)
        log_q = self.chance.log()
        states = self.centres(centre)
        true = (self.neighbours(around) * states[:, None]).sum(2) + log_q[around]
        better = torch.zeros_like(around)
        for ids in torch.arange(self.neighbours.num_embeddings).split(chunk_size):
            scores = torch.addmm(log_q[ids], states, self.neighbours(ids).t())
            better += (scores[:, None] > true[:, :, None]).sum(2)
        return float(better.double().mean())


def split(windows: Tensor) -> tuple[Tensor, Tensor]:
    """The word in the middle, and those around it."""
    middle = windows.shape[1] // 2
    return windows[:, middle], torch.cat([windows[:, :middle], windows[:, middle + 1 :]], 1)


def subsample(corpus: Corpus, threshold: float) -> Tensor:
    """The text without most occurrences of its most frequent words."""
    share = torch.bincount(corpus.ids, minlength=len(corpus.words)) / len(corpus.ids)
    keep = (threshold / share).sqrt() + threshold / share
    return corpus.ids[torch.rand(len(corpus.ids)) < keep[corpus.ids]]


def hold_out(windows: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Windows for training, and some from all over the text that share no pair with them."""
    places = torch.linspace(0, len(windows) - 1, num).long()
    width = windows.shape[1]
    near = (places[:, None] + torch.arange(1 - width, width)).clamp(0, len(windows) - 1)
    kept = torch.ones(len(windows), dtype=torch.bool).index_fill(0, near.flatten(), False)
    return windows[kept], windows[places]


def nearest(table: Tensor, words: list[str], ids: range, num: int = 5) -> dict[str, list[str]]:
    """The words whose vectors point the same way."""
    vectors = F.normalize(table)
    closest = (vectors[list(ids)] @ vectors.t()).topk(num + 1).indices[:, 1:]
    return {words[i]: [words[j] for j in row] for i, row in zip(ids, closest, strict=True)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Skip-gram with negative sampling.")
    add = parser.add_argument
    add("--text", type=Path, help="a plain text file (default: a sample of Wikipedia)")
    add("--max-words", type=int, default=50_000, help="words of the vocabulary, at most")
    add("--width", type=int, default=100, help="width of a word's vector")
    add("--reach", type=int, default=5, help="neighbours on each side")
    add("--negatives", type=int, default=5, help="weight of the negatives, a pair")
    add("--pool", type=int, default=256, help="negatives drawn for a batch")
    add("--subsample", type=float, default=1e-4, help="share above which words are thinned out")
    add("--batch-size", type=int, default=256, help="windows a worker and step")
    add("--steps", type=int, default=2000)
    add("--lr", type=float, default=0.1)
    add("--eval-windows", type=int, default=256, help="windows held out")
    add("--out", type=Path, default=Path("runs/word2vec"))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    corpus = load_corpus(args.text, args.max_words, args.out.parent)
    torch.manual_seed(0)  # The same text and start on every worker.
    windows = subsample(corpus, args.subsample).unfold(0, 2 * args.reach + 1, 1)
    training, held_out = hold_out(windows, args.eval_windows)
    loader = DataLoader(TensorDataset(training), args.batch_size, shuffle=True, drop_last=True)
    counts = torch.bincount(corpus.ids, minlength=len(corpus.words)).float()
    model = SkipGram(counts, args.width, args.negatives, args.pool)
    optimizer = torch.optim.Adagrad(model.parameters(), args.lr)
    session = parallax.parallelize(model, optimizer)

    rank_at_start = model.mean_rank(held_out)  # All together: lookups are collective.
    torch.manual_seed(1 + session.rank)  # Each worker draws its own negatives.
    losses = []
    for (batch,) in steps(session, session.shard(loader), args.steps, "word2vec"):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    rank = model.mean_rank(held_out)
    state = session.state_dict()  # Worker 0 gets it.
    result: dict[str, Any] = {
        "num_workers": session.num_workers,
        "num_words": len(corpus.words),
        "loss": sum(losses[-20:]) / len(losses[-20:]),
        "mean_rank_at_start": rank_at_start,
        "mean_rank": rank,
    }
    if session.rank == 0:
        first = min(200, len(corpus.words) // 2)  # Not the most frequent: they have no company.
        shown = range(first, min(first + 5, len(corpus.words)))
        result["nearest"] = nearest(state["centres.weight"], corpus.words, shown)
        for word, others in result["nearest"].items():
            print(f"{word}: {', '.join(others)}")
    write_result(result, args.out, session.rank)
    session.close()


if __name__ == "__main__":
    main()
