"""PyTorch's DistributedDataParallel over gloo, with dense or with sparse gradients of tables."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.engines.task import PATIENCE_SECONDS, Task, Trainer, train


def start(task: Task) -> Trainer:
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    model = task.model(sparse=task.options["sparse"])
    optimizer = task.optimizer(model.parameters())
    # Its documentation's way to save a copy of every gradient.
    return train(task, DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer)
