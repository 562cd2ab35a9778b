"""Parallax: the script for one device, and two lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

import parallax
from benchmarks.engines.task import Task, Turn, train
from benchmarks.workloads.model import POOL, tensors_of


def start(task: Task) -> Turn:
    model = task.model(sparse=False)
    optimizer = task.adagrad(model.parameters())
    session = parallax.parallelize(model, optimizer)
    tables = {f"tables.{place}.weight" for place in range(len(task.workload.tables))}
    turn = train(task, model, optimizer, _batches(task, session))

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


def _batches(task: Task, session: parallax.Session) -> Iterator[Any]:
    """The same batches as all engines have, by way of `session.shard`."""
    mine = [tensors_of(task.workload.batch(step, task.rank)) for step in range(POOL)]
    # Each worker's sample is one of its own batches; the others' are never read here.
    pool = [mine[index // task.num_workers] for index in range(POOL * task.num_workers)]
    loader = session.shard(DataLoader(pool, batch_size=1, collate_fn=lambda batch: batch[0]))
    while True:
        yield from loader
