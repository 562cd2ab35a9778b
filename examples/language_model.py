"""A word language model with a sampled softmax, trained data-parallel.

    parallax run -n 2 examples/language_model.py --steps 300 --out runs/language_model

`python examples/language_model.py` trains it on one device. What Parallax needs is the two lines
with `parallelize` and `shard`; the rest is an ordinary script. `--engine ddp` and `ddp-sparse`
train the same model under DistributedDataParallel, to compare with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from baseline import Baseline
from text import load_corpus
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import parallax


class LanguageModel(nn.Module):
    """Embedding, LSTM, projection, and a softmax over the target and a sample of the words."""

    def __init__(self, num_words: int, width: int, hidden: int, samples: int, sparse: bool) -> None:
        super().__init__()
        if not 0 < samples <= num_words // 2:
            raise ValueError(f"--samples {samples}: take 1 to {num_words // 2}, half of the words")
        self.num_words, self.samples = num_words, samples
        self.embedding = nn.Embedding(num_words, width, sparse=sparse)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.projection = nn.Linear(hidden, width, bias=False)
        self.out_weight = nn.Embedding(num_words, width, sparse=sparse)
        self.out_bias = nn.Embedding(num_words, 1, sparse=sparse)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.out_weight.weight, std=1 / math.sqrt(width))
        nn.init.zeros_(self.out_bias.weight)

    def forward(self, windows: Tensor) -> Tensor:
        """The mean sampled-softmax loss of predicting each word of a window from those before."""
        hidden, targets = self.read(windows)
        candidates, tries = self.draw_candidates()
        # One lookup serves targets and candidates: a row that is both travels once.
        words = torch.cat([targets, candidates])
        weight = self.out_weight(words)
        bias = self.out_bias(words).squeeze(1) - self.log_expected_count(words, tries)
        n = len(targets)
        true = (hidden * weight[:n]).sum(1) + bias[:n]
        sampled = torch.addmm(bias[n:], hidden, weight[n:].t())
        # A target among the candidates must not count twice; they are sorted, so it is soon found.
        place = torch.searchsorted(candidates, targets).clamp_(max=self.samples - 1)
        hit = (candidates[place] == targets).nonzero().squeeze(1)
        sampled[hit, place[hit]] = -math.inf
        return torch.mean(torch.logaddexp(true, sampled.logsumexp(1)) - true)

    def read(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """What is known before each target, and the targets."""
        output, _ = self.lstm(self.embedding(windows[:, :-1]))
        return self.projection(output.flatten(0, 1)), windows[:, 1:].flatten()

    def draw_candidates(self) -> tuple[Tensor, int]:
        """Distinct log-uniform word ids, sorted, and how many draws it took to find them."""
        num_draws = 2 * self.samples
        while True:
            draws = (
                (self.num_words + 1.0) ** torch.rand(num_draws, dtype=torch.float64) - 1
            ).long()
            found, index = draws.clamp_(max=self.num_words - 1).unique(return_inverse=True)
            if len(found) >= self.samples:
                first = torch.full_like(found, num_draws)
                first.scatter_reduce_(0, index, torch.arange(num_draws), "amin")
                last = int(first.kthvalue(self.samples).values)
                return found[first <= last], last + 1
            num_draws *= 2

    def log_expected_count(self, words: Tensor, tries: int) -> Tensor:
        """Log of the chance that a word is among the candidates after `tries` draws."""
        chance = torch.log1p(1 / (words + 1.0)) / math.log(self.num_words + 1)
        return torch.log(-torch.expm1(tries * torch.log1p(-chance)))

    @torch.no_grad()
    def perplexity(self, windows: Tensor) -> float:
        """Perplexity by the full softmax; the output rows are looked up once, a part at a time."""
        hidden, targets = self.read(windows)
        true = (hidden * self.out_weight(targets)).sum(1) + self.out_bias(targets).squeeze(1)
        parts = []
        for words in torch.arange(self.num_words).split(8192):
            bias = self.out_bias(words).squeeze(1)
            parts.append(torch.addmm(bias, hidden, self.out_weight(words).t()).logsumexp(1))
        return float((torch.stack(parts).logsumexp(0) - true).mean().exp())


def endless(batches: Iterable[Any]) -> Iterator[Tensor]:
    windows = None
    while True:
        for (windows,) in batches:
            yield windows
        if windows is None:
            raise SystemExit("The text is too short for one batch: take a smaller --batch-size.")


def train(
    model: nn.Module, lstm: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]
) -> tuple[list[float], list[float]]:
    """Take a step for each batch; give the seconds and the loss of each."""
    seconds, losses = [], []
    start = time.perf_counter()
    for windows in batches:
        loss = model(windows)
        loss.backward()
        nn.utils.clip_grad_norm_(lstm.parameters(), max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return seconds, losses


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A word language model with a sampled softmax.")
    add = parser.add_argument
    add("--engine", choices=["parallax", "ddp", "ddp-sparse", "plain"], default="parallax")
    add("--text", type=Path, help="a plain text file (default: a sample of Wikipedia)")
    add("--max-words", type=int, default=50_000, help="words of the vocabulary, at most")
    add("--width", type=int, default=256, help="width of the embedding and the projection")
    add("--hidden", type=int, default=256, help="width of the LSTM's cell")
    add("--samples", type=int, default=1024, help="candidates of the sampled softmax")
    add("--batch-size", type=int, default=32, help="windows a worker and step")
    add("--window", type=int, default=20, help="words of a window")
    add("--steps", type=int, default=300)
    add("--lr", type=float, default=0.03)
    add("--eval-windows", type=int, default=256, help="windows held out for the perplexity")
    add("--out", type=Path, default=Path("runs/language_model"))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    corpus = load_corpus(args.text, args.max_words, args.out.parent)
    windows = corpus.ids.unfold(0, args.window + 1, args.window)
    held_out, dataset = windows[-args.eval_windows :], TensorDataset(windows[: -args.eval_windows])
    loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
    torch.manual_seed(0)
    sizes = (len(corpus.words), args.width, args.hidden, args.samples)
    model = LanguageModel(*sizes, sparse=args.engine == "ddp-sparse")
    optimizer = torch.optim.Adagrad(model.parameters(), args.lr, initial_accumulator_value=1e-5)
    if args.engine == "parallax":
        session = parallax.parallelize(model, optimizer)
    else:
        session = Baseline(model, args.engine)

    torch.manual_seed(1 + session.rank)  # Each worker draws its own candidates.
    batches = itertools.islice(endless(session.shard(loader)), args.steps)
    if session.rank == 0:  # The launcher keeps worker 0's bar on the terminal's last line.
        batches = tqdm(batches, args.engine, args.steps, unit="step", file=sys.stdout, ncols=68)
    trained = getattr(session, "trained", model)  # DDP wraps a model; Parallax changes it in place.
    seconds, losses = train(trained, model.lstm, optimizer, batches)

    step_seconds = median(seconds[len(seconds) // 10 :])  # The first tenth warms up.
    result = {
        "engine": args.engine,
        "num_workers": session.num_workers,
        "num_words": len(corpus.words),
        "step_seconds": step_seconds,
        "words_per_second": args.batch_size * args.window * session.num_workers / step_seconds,
        "losses": losses,
        "bytes_a_step": session.ledger.mean_bytes(),
        "perplexity": model.perplexity(held_out),  # All together: lookups are collective.
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    save(session, result, args.out)
    session.close()


def save(session: parallax.Session | Baseline, result: dict[str, Any], out: Path) -> None:
    session.save(out / "checkpoint")
    state = session.state_dict()
    if session.rank == 0:
        print(session.plan)
        out.mkdir(parents=True, exist_ok=True)
        torch.save(state, out / "model.pt")
        (out / "result.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
