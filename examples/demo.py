"""What `make demo` runs: one language model, with Parallax and with DDP, and a table of all.

DDP with sparse gradients is the strongest choice that plain PyTorch has for such a model; dense
gradients are what an unchanged script gets from DDP. All have the same text, batch size and number
of workers, and run one after the other. Dense DDP is slow, and takes fewer steps.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from text import load_corpus

HERE = Path(__file__).resolve().parent
TITLES = {"parallax": "Parallax", "ddp-sparse": "DDP sparse", "ddp": "DDP dense", "plain": "plain"}
LAST_STEPS = 20
# DDP dense takes one step for so many of the others: enough for its speed, which is all it shows.
DENSE_SHARE = 10
INTERRUPTED = 130
RULE = 80

Result = dict[str, Any]


class TrainingError(Exception):
    """A training ended with an error, which it has printed itself."""

    def __init__(self, engine: str, exit_code: int) -> None:
        super().__init__(f"The training with {TITLES[engine]} failed; its error stands above.")
        # A child that a signal ended has a negative code; the shell's habit is 128 + signal.
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code


def train(engine: str, args: argparse.Namespace) -> Result:
    """Train in processes of their own and read back what they measured."""
    out = args.out / engine
    steps = max(args.steps // DENSE_SHARE, 1) if engine == "ddp" else args.steps
    (out / "result.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "parallax.launch.command", "run", "-n", str(args.workers)]
    command += _script(engine)
    command += ["--out", str(out), "--steps", str(steps)]
    command += ["--text", str(args.text)] if args.text else []
    with subprocess.Popen(command + args.extra) as child:
        try:
            exit_code = child.wait()
        except KeyboardInterrupt:
            # The terminal has told the child as well; it is ending its workers.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            child.wait()
            raise
    if exit_code:
        raise TrainingError(engine, exit_code)
    result: Result = json.loads((out / "result.json").read_text())
    return {**result, "engine": engine}


def _script(engine: str) -> list[str]:
    if engine == "parallax":
        return [str(HERE / "lm1b.py")]
    return [str(HERE / "lm1b_ddp.py"), "--engine", engine]


def render(results: list[Result], out: Path) -> str:
    """The closing table; the others are compared with the first result."""
    first = results[0]
    names = list(first["bytes_a_step"])
    heading = [TITLES[r["engine"]] for r in results]
    lines = [
        f"{first['num_workers']} workers, {first['num_words']:,} words in the vocabulary, "
        f"{len(first['losses'])} steps",
        "",
        _row("", heading),
        _row("words a second", [f"{r['words_per_second']:,.0f}" for r in results]),
        _row(f"  {heading[0]} against it", [_ratio(first, r) for r in results]),
        _row("step, median", [f"{r['step_seconds'] * 1e3:,.1f} ms" for r in results]),
        _row(f"loss, last {LAST_STEPS} steps", [_loss(first, r) for r in results]),
        _row("perplexity, held out", [_perplexity(first, r) for r in results]),
        _row("peak memory of worker 0", [_size(r["peak_rss_bytes"]) for r in results]),
        "",
        _row("bytes a step, sent and received", heading),
        *(_row(f"  {n}", [_size(r["bytes_a_step"][n]) for r in results]) for n in names),
        _row("  all", [_size(sum(r["bytes_a_step"].values())) for r in results]),
        "",
        "Two workers are where sharding gains least. With N of them, DDP sparse sends each",
        "worker's rows to N-1 others; Parallax moves a row about twice, whatever N is.",
        "",
        "Outputs",
        *_outputs(results, out),
    ]
    return "\n".join(lines)


def _row(label: str, cells: list[str]) -> str:
    return f"{label:<33}" + "".join(f"{cell:>14}" for cell in cells)


def _ratio(first: Result, other: Result) -> str:
    if other is first:
        return ""
    return f"{first['words_per_second'] / other['words_per_second']:.2f} ×"


def _loss(first: Result, other: Result) -> str:
    return f"{mean(other['losses'][-LAST_STEPS:]):.3f}" if _same_steps(first, other) else "–"


def _perplexity(first: Result, other: Result) -> str:
    return f"{other['perplexity']:,.1f}" if _same_steps(first, other) else "–"


def _same_steps(first: Result, other: Result) -> bool:
    return len(first["losses"]) == len(other["losses"])


def _size(size_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:,.2f} {unit}"
    return f"{size_bytes:,.0f} B"


def _outputs(results: list[Result], out: Path) -> list[str]:
    kinds = {
        "result.json": "the numbers above and the loss of every step",
        "model.pt": "a plain state dict, for model.load_state_dict",
        "checkpoint": "for session.load, with any number of workers",
    }
    found = [(out / r["engine"] / name, what) for r in results for name, what in kinds.items()]
    return [f"  {path!s:<36}  {what}" for path, what in found if path.exists()]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=list(TITLES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", type=Path, help="a plain text file (default: Wikipedia sample)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.set_defaults(engines=["parallax", "ddp-sparse", "ddp"])
    args, extra = parser.parse_known_args()
    args.extra = extra  # For the language model: sizes, for example.
    return args


def main() -> int:
    args = parse_args()
    # Prepared here once, so that the workers only read it.
    corpus = load_corpus(args.text, 50_000, args.out)
    print(f"Text: {len(corpus.ids):,} words, {len(corpus.words):,} distinct.", flush=True)
    results = []
    try:
        for engine in args.engines:
            print(f"\nTraining with {TITLES[engine]}, {args.workers} workers.", flush=True)
            try:
                results.append(train(engine, args))
            except TrainingError as error:
                if engine == "parallax":
                    raise
                # What is compared with may fail (torch's sparse all-reduce over gloo does, rarely,
                # with a corrupted heap); the table then goes without it.
                print(f"\n{error} It is left out.", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nInterrupted: no worker is left running.", file=sys.stderr)
        return INTERRUPTED
    except TrainingError as error:
        print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    rule = "─" * RULE
    print(f"\n{rule}\n{render(results, args.out)}\n{rule}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
