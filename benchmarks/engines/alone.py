"""Every worker by itself, sparse gradients: what a step costs before anything is exchanged."""

from __future__ import annotations

from benchmarks.engines.task import Task, Trainer, train


def start(task: Task) -> Trainer:
    model = task.model(sparse=True)
    return train(task, model, task.adagrad(model.parameters()))
