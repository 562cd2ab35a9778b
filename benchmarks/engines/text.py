"""Training on real text, with Parallax or with DDP; a turn ends with the held-out perplexity.

Start, batches and candidates are the same, so the perplexities are too, but for rounding.
"""

from __future__ import annotations

from itertools import count

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallax
from benchmarks.engines.task import Task, Turn
from benchmarks.workloads.text import Text


def start(task: Task) -> Turn:
    text = task.workload
    assert isinstance(text, Text)
    is_ours = task.options["engine"] == "parallax"
    model = text.model(sparse=not is_ours)
    optimizer = task.adagrad(model.parameters())
    trained: nn.Module = model
    if is_ours:
        parallax.parallelize(model, optimizer)
    else:
        dist.init_process_group("gloo")
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.manual_seed(1 + task.rank)  # Each worker draws its own candidates.
    steps = count()

    def turn(num_steps: int) -> float:
        with task.span("train"):
            for _ in range(num_steps):
                windows = text.share(next(steps), task.rank, task.num_workers)
                text.step(trained, model, optimizer, windows)
        return float(model.perplexity(text.held_out))

    return turn
