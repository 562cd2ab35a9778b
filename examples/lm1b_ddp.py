"""The training of `lm1b.py` without Parallax: DistributedDataParallel, or plain PyTorch.

    parallax run -n 2 examples/lm1b_ddp.py --engine ddp-sparse

Only for comparison. `Baseline` has the part of `parallax.Session` that the training uses, so that
both run the same loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm1b import build, keep, load, make_parser, parse_args, train
from loop import steps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Ledger:
    """Bytes sent and received for each parameter, from the gradients of the first step.

    DDP counts nothing itself. Its ring all-reduce sends a dense gradient 2(N-1)/N times; a sparse
    one is gathered, its distinct rows and their ids at every other worker.
    """

    def __init__(self, model: nn.Module, num_workers: int) -> None:
        self._num_workers = num_workers
        self._bytes: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            # Runs before DDP takes the gradient, which is this worker's own until then.
            parameter.register_hook(partial(self._count, name))

    def mean_bytes(self) -> dict[str, float]:
        return self._bytes

    def _count(self, name: str, grad: Tensor) -> None:
        if name in self._bytes:
            return
        others = self._num_workers - 1
        if grad.is_sparse:
            num_rows = grad._indices().unique().numel()
            row_bytes = grad.shape[1] * grad.element_size() + 8
            self._bytes[name] = 2 * others * num_rows * row_bytes
        else:
            self._bytes[name] = 4 * others / self._num_workers * grad.nbytes


class Baseline:
    """What stands in for a session when Parallax is not used."""

    plan = "No plan: every parameter is moved as PyTorch does."
    step = 0  # It always begins from nothing.

    def __init__(self, model: nn.Module, engine: str) -> None:
        self.model, self.rank, self.num_workers = model, 0, 1
        self._distributed = engine != "plain"
        if self._distributed:
            dist.init_process_group("gloo")
            self.rank, self.num_workers = dist.get_rank(), dist.get_world_size()
        self.ledger = Ledger(model, self.num_workers)
        torch.sparse.check_sparse_tensor_invariants.disable()  # Or Adagrad warns that it is off.
        self.trained = DistributedDataParallel(model) if self._distributed else model

    def shard(self, loader: DataLoader[Any]) -> DataLoader[Any] | Shares:
        return Shares(loader) if self._distributed else loader

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def close(self) -> None:
        if self._distributed:
            dist.destroy_process_group()


class Shares:
    """A loader's batches for one DDP worker, shuffled anew in each epoch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, drop_last=True)
        self._loader = DataLoader(
            loader.dataset, loader.batch_size, sampler=self._sampler, drop_last=True
        )
        self._epochs = itertools.count()

    def __iter__(self) -> Iterator[Any]:
        self._sampler.set_epoch(next(self._epochs))
        return iter(self._loader)


def main() -> None:
    parser = make_parser()
    parser.set_defaults(out=Path("runs/lm1b_ddp"))
    parser.add_argument("--engine", choices=["ddp", "ddp-sparse", "plain"], default="ddp-sparse")
    args = parse_args(parser)
    num_words, loader, held_out = load(args)
    model, optimizer = build(args, num_words, sparse=args.engine == "ddp-sparse")
    session = Baseline(model, args.engine)

    torch.manual_seed(1 + session.rank)  # Each worker draws its own candidates.
    batches = steps(session, session.shard(loader), args.steps, args.engine)
    seconds, losses = train(session.trained, model.lstm, optimizer, batches)
    perplexity = model.perplexity(held_out)

    keep(session, args, seconds, losses, num_words=num_words, perplexity=perplexity)
    session.close()


if __name__ == "__main__":
    main()
