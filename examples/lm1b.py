"""A word language model after the Parallax paper, trained data-parallel.

    parallax run -n 2 examples/lm1b.py --steps 300 --out runs/lm1b

`python examples/lm1b.py` trains it on one device. What Parallax needs is the two lines with
`parallelize` and `shard`; the rest is an ordinary script. `--preset paper` has the paper's sizes;
its tables are built on the `meta` device, so that no worker ever holds one whole. `--engine ddp`
and `ddp-sparse` train the same model under DistributedDataParallel, to compare with.
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
from baseline import Baseline
from loop import steps, write_result
from text import load_corpus
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import parallax

# 793,470 words, of which the text's are the first; END and UNKNOWN come on top of --max-words.
PAPER = {"max_words": 793_468, "rows": 793_470, "width": 512, "hidden": 2048, "samples": 8192}
PAPER |= {"batch_size": 128, "lr": 0.2}


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


def build(args: argparse.Namespace, num_words: int) -> LanguageModel:
    torch.manual_seed(0)
    sizes = (max(num_words, args.rows), args.width, args.hidden, args.samples)
    device = "meta" if args.engine == "parallax" else "cpu"
    return LanguageModel(*sizes, sparse=args.engine == "ddp-sparse", device=device)


def train(
    model: nn.Module, lstm: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]
) -> tuple[list[float], list[float]]:
    """Take a step for each batch; give the seconds and the loss of each."""
    seconds, losses = [], []
    start = time.perf_counter()
    for (windows,) in batches:
        loss = model(windows)
        loss.backward()
        nn.utils.clip_grad_norm_(lstm.parameters(), max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return seconds, losses


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A word language model with a sampled softmax.")
    add = parser.add_argument
    add("--engine", choices=["parallax", "ddp", "ddp-sparse", "plain"], default="parallax")
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
    add("--wire", choices=["float32", "bf16", "int8"], default="float32", help="how rows travel")
    add("--eval-windows", type=int, default=256, help="windows held out for the perplexity")
    add("--out", type=Path, default=Path("runs/lm1b"))
    if parser.parse_args(words).preset:
        parser.set_defaults(**PAPER)
    return parser.parse_args(words)


def main() -> None:
    args = parse_args()
    corpus = load_corpus(args.text, args.max_words, args.out.parent)
    windows = corpus.ids.unfold(0, args.window + 1, args.window)
    held_out, dataset = windows[-args.eval_windows :], TensorDataset(windows[: -args.eval_windows])
    loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
    model = build(args, len(corpus.words))
    optimizer = torch.optim.Adagrad(model.parameters(), args.lr, initial_accumulator_value=1e-5)
    if args.engine == "parallax":
        options = {"init": start_values(args.width), "wire": args.wire}
        session = parallax.parallelize(model, optimizer, **options)
    else:
        session = Baseline(model, args.engine)

    torch.manual_seed(1 + session.rank)  # Each worker draws its own candidates.
    batches = steps(session, session.shard(loader), args.steps, args.engine)
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
    write_result(result, out, session.rank)


if __name__ == "__main__":
    main()
