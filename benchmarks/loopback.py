"""The time of a training step beside DDP's, on the workers of one machine.

    python benchmarks/loopback.py             # a language model: two tables, sampled softmax
    python benchmarks/loopback.py --accelerator-ms 20     # the same, its compute emulated
    python benchmarks/loopback.py --resnet    # no table at all: what Parallax may not cost

Why the comparison is fair: every engine trains the same model class from the same start on the
same batches and the same sampled candidates, with the same optimizer and number of threads; the
loss in the table shows it. All live in the same processes and take turns (A B C A B C …), so that a
slower minute of the machine slows all of them. `DDP sparse` is the best that plain PyTorch has for
tables, and both DDP models have `gradient_as_bucket_view`, which saves them a copy. A turn is timed
by the slowest worker. `no exchange` is the same step on each worker alone, so its loss differs: it
shows how much of the time is computing, below which no engine can go; the rest is in the column
`exchange`. Bytes are those that the loopback interface counted in a step, headers included;
nothing else should use it meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from accelerator import AcceleratedLanguageModel
from resnet import ResNet
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import parallax

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from lm1b import LanguageModel

WARM_UP_STEPS = 3
ALONE = "no exchange"
Step = Callable[[], float]


@dataclass
class Contestant:
    """An engine with its model, and what was measured of it."""

    name: str
    step: Step = field(repr=False)
    num_steps: int
    """Steps of one repetition."""
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    loss: float = 0.0


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Callable[[int], tuple[Tensor, ...]]
) -> Step:
    taken = 0

    def step() -> float:
        nonlocal taken
        # Batches and candidates depend on the worker and the step only, not on the engine.
        torch.manual_seed(taken * dist.get_world_size() + dist.get_rank())
        loss = model(*batch(taken))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        return float(loss.detach())

    return step


def with_ddp(model: nn.Module) -> DistributedDataParallel:
    # A group of its own, so that no engine's messages wait behind another's.
    return DistributedDataParallel(
        model, process_group=dist.new_group(), gradient_as_bucket_view=True
    )


def language_models(args: argparse.Namespace) -> list[Contestant]:
    def batch(_: int) -> tuple[Tensor]:
        uniform = torch.rand(args.batch_size, args.window + 1, dtype=torch.float64)
        return (((args.words + 1.0) ** uniform - 1).long().clamp_(max=args.words - 1),)

    def build(sparse: bool) -> tuple[LanguageModel, torch.optim.Optimizer]:
        torch.manual_seed(0)
        kind = AcceleratedLanguageModel if args.accelerator_ms else LanguageModel
        model = kind(args.words, args.width, args.hidden, args.samples, sparse=sparse)
        model.seconds = args.accelerator_ms / 1000
        return model, torch.optim.Adagrad(
            model.parameters(), lr=0.03, initial_accumulator_value=1e-5
        )

    contestants = []
    model, optimizer = build(sparse=False)
    parallax.parallelize(model, optimizer)
    contestants.append(Contestant("Parallax", make_step(model, optimizer, batch), args.steps))
    model, optimizer = build(sparse=True)
    step = make_step(with_ddp(model), optimizer, batch)
    contestants.append(Contestant("DDP sparse", step, args.steps))
    # Sparse gradients and nobody to exchange them with: what a step costs before any exchange.
    step = make_step(*build(sparse=True), batch)
    contestants.append(Contestant(ALONE, step, args.steps))
    if not args.no_dense:
        model, optimizer = build(sparse=False)
        step = make_step(with_ddp(model), optimizer, batch)
        contestants.append(Contestant("DDP dense", step, args.dense_steps))
    return contestants


def resnets(args: argparse.Namespace) -> list[Contestant]:
    def batch(_: int) -> tuple[Tensor, Tensor]:
        return torch.randn(args.batch_size, 3, 32, 32), torch.randint(10, (args.batch_size,))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = ResNet()
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    model, optimizer = build()
    parallax.parallelize(model, optimizer)
    ours = Contestant("Parallax", make_step(model, optimizer, batch), args.steps)
    model, optimizer = build()
    return [ours, Contestant("DDP", make_step(with_ddp(model), optimizer, batch), args.steps)]


def measure(contestants: list[Contestant], repetitions: int) -> None:
    for each in contestants:
        for _ in range(WARM_UP_STEPS):
            each.loss = each.step()
        mean = torch.tensor(each.loss) / dist.get_world_size()
        dist.all_reduce(mean)
        each.loss = float(mean)
    turns = [each for _ in range(repetitions) for each in contestants]
    is_quiet = dist.get_rank() != 0
    for each in tqdm(turns, "repetitions", file=sys.stdout, ncols=68, disable=is_quiet):
        dist.barrier()
        bytes_before, start = loopback_bytes(), time.perf_counter()
        for _ in range(each.num_steps):
            each.step()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.barrier()
        moved = loopback_bytes() - bytes_before
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        each.seconds.append(float(seconds) / each.num_steps)
        each.sent_bytes.append(moved / each.num_steps / dist.get_world_size())


def loopback_bytes() -> int:
    """Bytes that the loopback interface has sent; 0 where the system does not tell."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[9]) for line in lines if line.split()[0] == "lo:"), 0)


def run_worker(args: argparse.Namespace) -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # Or Adagrad warns that it is off.
    dist.init_process_group("gloo")
    contestants = resnets(args) if args.resnet else language_models(args)
    measure(contestants, args.repetitions)
    if dist.get_rank() == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        facts = [{k: v for k, v in vars(each).items() if k != "step"} for each in contestants]
        args.out.write_text(json.dumps(facts, indent=1))


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; times are also shown as multiples of the first result's."""
    lines = [
        "| engine | step, median [min–max] | Parallax = 1 | exchange | sent by a worker | loss |",
        "|---|---|---|---|---|---|",
    ]
    ours = results[0]
    alone = next((median(r["seconds"]) for r in results if r["name"] == ALONE), None)
    for each in results:
        low, middle, high = (1e3 * of(each["seconds"]) for of in (min, median, max))
        # Turns that followed each other are compared with each other.
        ratio = median(b / a for a, b in zip(ours["seconds"], each["seconds"], strict=True))
        exchange = "–" if alone is None else f"{middle - 1e3 * alone:,.1f} ms"
        sent = median(each["sent_bytes"]) / 1e6
        lines.append(
            f"| {each['name']} | {middle:,.1f} ms [{low:,.1f}–{high:,.1f}] | {ratio:.2f} × "
            f"| {exchange} | {sent:,.2f} MB | {each['loss']:.4f} |"
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--resnet", action="store_true", help="a small ResNet against plain DDP")
    add(
        "--accelerator-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="emulate an accelerator: the dense compute is a sleep of MS, all else is real",
    )
    add("--no-dense", action="store_true", help="leave out DDP dense, which is very slow")
    add("--workers", type=int, help="default: 4, with --resnet 2")
    add("--repetitions", type=int, help="turns of each engine (default: 7, with --resnet 60)")
    add("--steps", type=int, help="steps of a turn (default: 8, with --resnet 2)")
    add("--dense-steps", type=int, default=2, help="steps of a turn of DDP dense")
    add("--words", type=int, default=200_000)
    add("--width", type=int, default=256)
    add("--hidden", type=int, default=64)
    add("--samples", type=int, default=2048)
    add("--batch-size", type=int, default=32)
    add("--window", type=int, default=20)
    add("--out", type=Path, default=Path("runs/loopback.json"))
    add("--as-worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.workers = args.workers or (2 if args.resnet else 4)
    args.repetitions = args.repetitions or (60 if args.resnet else 7)
    # Short turns for what differs less than the machine does from one second to the next.
    args.steps = args.steps or (2 if args.resnet else 8)
    return args


def main() -> int:
    args = parse_args()
    if args.as_worker:
        run_worker(args)
        return 0
    command = [sys.executable, "-m", "parallax.launch.command", "run", "-n", str(args.workers)]
    exit_code = subprocess.call([*command, __file__, *sys.argv[1:], "--as-worker"])
    if exit_code == 0:
        emulated = f", compute emulated by {args.accelerator_ms:g} ms of sleep"
        print(
            f"\n{args.workers} workers, {args.repetitions} turns of each engine"
            f"{emulated if args.accelerator_ms else ''}\n"
        )
        print(table(json.loads(args.out.read_text())))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
