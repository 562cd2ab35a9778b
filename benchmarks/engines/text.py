"""Training on real text, with Parallax or with DDP; a turn ends with the held-out perplexity.

Start, batches and candidates are the same, so the perplexities are too, but for rounding.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallax
from benchmarks.engines.task import PATIENCE_SECONDS, Task, Trainer
from benchmarks.workloads.text import Text, endless


def start(task: Task) -> Trainer:
    text = task.workload
    assert isinstance(text, Text)
    is_ours = task.options["engine"] == "parallax"
    model = text.model(sparse=not is_ours)
    optimizer = task.adagrad(model.parameters())
    trained: nn.Module = model
    if is_ours:
        session = parallax.parallelize(model, optimizer, timeout_seconds=PATIENCE_SECONDS)
        data = endless(session.shard(text.loader()))
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
        data = text.batches(task.rank, task.num_workers)
    torch.manual_seed(1 + task.rank)  # Each worker draws its own candidates.
    batch = next(data)

    def turn(num_steps: int) -> float:
        nonlocal batch
        with task.span("train"):
            for _ in range(num_steps):
                text.step(trained, model, optimizer, batch)
                batch = next(data)
            dist.barrier()  # Until the slowest worker is there.
        return float(model.perplexity(text.held_out))

    return turn
