"""Parallax: the script for one device, and one line."""

from __future__ import annotations

import parallax
from benchmarks.engines.task import Task, Turn, train


def start(task: Task) -> Turn:
    model = task.model(sparse=False)
    optimizer = task.adagrad(model.parameters())
    parallax.parallelize(model, optimizer)
    return train(task, model, optimizer)
