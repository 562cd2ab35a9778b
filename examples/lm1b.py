"""A word language model after the Parallax paper, trained data-parallel.

    parallax run -n 2 examples/lm1b.py --steps 300 --out runs/lm1b

`python examples/lm1b.py` trains it on one device. What Parallax needs is the two lines with
`parallelize` and `shard`; the rest is an ordinary script. The tables are built on the `meta`
device, so that no worker holds one whole while it trains; at the end worker 0 gathers them for
`model.pt`. `--preset paper` has the paper's sizes. `lm1b_ddp.py` is the same training under DDP.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loop import steps, write_result
from text import load_corpus
from torch import Tensor, nn
from torch.optim import Adagrad
from torch.utils.data import DataLoader, TensorDataset

import parallax

# 793,470 words, of which the text's are the first; END and UNKNOWN come on top of --max-words.
PAPER = {"max_words": 793_468, "rows": 793_470, "width": 512, "hidden": 2048, "samples": 8192}
# The paper's loss is a sum over the 20 words of a window, and its accumulator 1: that of a mean is
# 1/400 of it, and the clipped norm 1/20.
PAPER |= {"batch_size": 128, "lr": 0.2, "accumulator": 1 / 400}
MAX_NORM = 0.5


class LanguageModel(nn.Module):
    """Embedding, LSTM with projection, and a softmax over the target and a sample of the words."""

    def __init__(
        self, num_words: int, width: int, hidden: int, samples: int, **tables: Any
    ) -> None:
        """`tables` are options of the tables: `sparse`, `device`."""
        super().__init__()
        self.embedding = nn.Embedding(num_words, width, **tables)
        # An LSTM projects to fewer elements than its cell has; to more, a layer behind it does.
        narrows, widens = hidden > width, hidden < width
        self.lstm = nn.LSTM(width, hidden, proj_size=width if narrows else 0, batch_first=True)
        self.projection = nn.Linear(hidden, width, bias=False) if widens else nn.Identity()
        self.softmax = parallax.nn.SampledSoftmaxLoss(num_words, width, samples, **tables)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, windows: Tensor) -> Tensor:
        """The mean sampled loss of predicting each word of a window from those before."""
        return self.softmax(*self.read(windows))

    def read(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """What is known before each target, and the targets."""
        states, _ = self.lstm(self.embedding(windows[:, :-1]))
        return self.projection(states), windows[:, 1:]

    @torch.no_grad()
    def perplexity(self, windows: Tensor) -> float:
        """Exact, over all words."""
        return self.softmax.perplexity(*self.read(windows))


def start_values(width: int) -> dict[str, Any]:
    """Of tables on `meta`: those that the modules give themselves elsewhere."""
    normal = parallax.init.normal
    return {
        "embedding.weight": normal(std=0.1),
        "softmax.table.weight": normal(std=1 / math.sqrt(width)),
        "softmax.bias.weight": parallax.init.constant(0.0),
    }


def load(args: argparse.Namespace) -> tuple[int, DataLoader[Any], Tensor]:
    """The number of distinct words, the windows to train on, and those held out."""
    corpus = load_corpus(args.text, args.max_words, args.out.parent)
    windows = corpus.ids.unfold(0, args.window + 1, args.window)
    held_out, dataset = windows[-args.eval_windows :], TensorDataset(windows[: -args.eval_windows])
    loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
    return len(corpus.words), loader, held_out


def build(args: argparse.Namespace, num_words: int, **tables: Any) -> tuple[LanguageModel, Adagrad]:
    torch.manual_seed(0)
    rows = max(num_words, args.rows)
    model = LanguageModel(rows, args.width, args.hidden, args.samples, **tables)
    return model, Adagrad(model.parameters(), args.lr, initial_accumulator_value=args.accumulator)


def train(
    model: nn.Module, lstm: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]
) -> tuple[list[float], list[float]]:
    """Take a step for each batch; give the seconds and the loss of each."""
    seconds, losses = [], []
    start = time.perf_counter()
    for (windows,) in batches:
        loss = model(windows)
        loss.backward()
        nn.utils.clip_grad_norm_(lstm.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return seconds, losses


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A word language model with a sampled softmax.")
    add = parser.add_argument
    add("--preset", choices=["paper"], help="the sizes of the paper; other options win over it")
    add("--text", type=Path, help="a plain text file (default: a sample of Wikipedia)")
    add("--max-words", type=int, default=50_000, help="words of the vocabulary, at most")
    add("--rows", type=int, default=0, help="rows of the tables, if the text has fewer words")
    add("--width", type=int, default=256, help="width of the embedding and the projection")
    add("--hidden", type=int, default=512, help="width of the LSTM's cell")
    add("--samples", type=int, default=1024, help="candidates of the sampled softmax")
    add("--batch-size", type=int, default=32, help="windows a worker and step")
    add("--window", type=int, default=20, help="words of a window")
    add("--steps", type=int, default=300)
    add("--lr", type=float, default=0.03)
    add("--accumulator", type=float, default=1e-5, help="Adagrad's sum of squares at the start")
    add("--eval-windows", type=int, default=256, help="windows held out for the perplexity")
    add("--out", type=Path, default=Path("runs/lm1b"))
    return parser


def parse_args(
    parser: argparse.ArgumentParser, words: list[str] | None = None
) -> argparse.Namespace:
    if parser.parse_args(words).preset:
        parser.set_defaults(**PAPER)
    return parser.parse_args(words)


def main() -> None:
    parser = make_parser()
    parser.add_argument(
        "--wire", choices=["float32", "bf16", "int8"], default="float32", help="how rows travel"
    )
    args = parse_args(parser)
    num_words, loader, held_out = load(args)
    model, optimizer = build(args, num_words, device="meta")
    options = {"init": start_values(args.width), "wire": args.wire}
    session = parallax.parallelize(model, optimizer, **options)

    torch.manual_seed(1 + session.rank)  # Each worker draws its own candidates.
    batches = steps(session, session.shard(loader), args.steps, "lm1b")
    seconds, losses = train(model, model.lstm, optimizer, batches)
    perplexity = model.perplexity(held_out)  # All together: lookups are collective.

    session.save(args.out / "checkpoint")
    keep(session, args, seconds, losses, num_words=num_words, perplexity=perplexity)
    session.close()


def keep(
    session: Any, args: argparse.Namespace, seconds: list[float], losses: list[float], **found: Any
) -> None:
    """Write the model as a plain state dict, and the figures."""
    step_seconds = median(seconds[len(seconds) // 10 :])  # The first tenth warms up.
    words = args.batch_size * args.window * session.num_workers
    result = {
        "num_workers": session.num_workers,
        "step_seconds": step_seconds,
        "words_per_second": words / step_seconds,
        "losses": losses,
        "bytes_a_step": session.ledger.mean_bytes(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **found,
    }
    state = session.state_dict()
    if session.rank == 0:
        print(session.plan)
        args.out.mkdir(parents=True, exist_ok=True)
        torch.save(state, args.out / "model.pt")
    write_result(result, args.out, session.rank)


if __name__ == "__main__":
    main()
