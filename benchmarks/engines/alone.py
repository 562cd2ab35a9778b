"""Every worker by itself: what a step costs before anything is exchanged. Gradients of tables are
sparse, unless the optimizer takes dense ones only."""

from __future__ import annotations

from benchmarks.engines.task import Task, Trainer, train


def start(task: Task) -> Trainer:
    model = task.model(sparse=task.workload.adamw is None)
    return train(task, model, task.optimizer(model.parameters()))
