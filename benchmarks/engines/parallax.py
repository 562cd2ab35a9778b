"""Parallax: the script for one device, and one line."""

from __future__ import annotations

import parallax
from benchmarks.engines.task import Task, Turn, train


def start(task: Task) -> Turn:
    model = task.model(sparse=False)
    optimizer = task.adagrad(model.parameters())
    session = parallax.parallelize(model, optimizer)
    tables = {f"tables.{place}.weight" for place in range(len(task.workload.tables))}
    turn = train(task, model, optimizer)

    def profiled(num_steps: int) -> float:
        before = session.ledger.header_seconds
        loss = turn(num_steps)
        task.seconds["headers"] = session.ledger.header_seconds - before
        for record in list(session.ledger.steps)[-num_steps:]:
            for name, entry in record.parameters.items():
                kind = "rows" if name in tables else "dense"
                task.seconds[kind] = task.seconds.get(kind, 0.0) + entry.seconds
        return loss

    return profiled
