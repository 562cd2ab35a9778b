"""Parallax: the script for one device, and two lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import parallax
from benchmarks.engines.task import PATIENCE_SECONDS, Task, Trainer, train
from benchmarks.workloads.hot import HotApart
from benchmarks.workloads.model import tensors_of
from benchmarks.workloads.workload import POOL, TILE_ROWS, Table


def start(task: Task) -> Trainer:
    if hot_rows := task.options.get("hot_rows"):
        task.workload = HotApart(task.workload, tuple(hot_rows), is_emulated=task.is_emulated)
    # On `meta` no worker ever has a whole table; all of them at once would not fit into memory.
    model = task.model(sparse=False, device="meta")
    optimizer = task.optimizer(model.parameters())
    tables = {
        f"tables.{place}.weight": start_rows(table)
        for place, table in enumerate(task.workload.tables)
    }
    session = parallax.parallelize(
        model,
        optimizer,
        init=tables,
        timeout_seconds=PATIENCE_SECONDS,
        **task.options["config"],
    )
    if task.options.get("clocked"):
        _clock_planning(task, session)
    turn = train(task, model, optimizer, _batches(task, session))

    def profiled(num_steps: int) -> float:
        before = session.ledger.header_seconds
        loss = turn(num_steps)
        task.seconds["headers"] = session.ledger.header_seconds - before
        routes = {line.name: line.route for line in session.plan.parameters}
        for record in list(session.ledger.steps)[-num_steps:]:
            for name, entry in record.parameters.items():
                kind = "rows" if routes[name] == "sharded" else "dense"
                task.seconds[kind] = task.seconds.get(kind, 0.0) + entry.seconds
        return loss

    return profiled


def start_rows(table: Table) -> Any:
    """The rows of these ids as training begins, as `Config.init` wants them."""
    tile = torch.from_numpy(table.start(0, TILE_ROWS))

    def fill(ids: Tensor, row_shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
        return tile[ids % TILE_ROWS].to(dtype)

    return fill


def _clock_planning(task: Task, session: parallax.Session) -> None:
    """Have what planning, measuring and the ledger take in the span `planning`."""
    for owner, name in (
        (session.ledger, "add"),
        (session.ledger, "add_shared"),
        (session.ledger, "close_step"),
        (session._training.adaptive_plan, "end_step"),
        (session._training.adaptive_plan, "after_step"),
    ):
        setattr(owner, name, task.span("planning")(getattr(owner, name)))


def _batches(task: Task, session: parallax.Session) -> Iterator[Any]:
    """The same batches as all engines have, by way of `session.shard`."""
    mine = [tensors_of(task.workload.batch(step, task.rank)) for step in range(POOL)]
    # Each worker's sample is one of its own batches; the others' are never read here.
    pool: Any = [mine[index // task.num_workers] for index in range(POOL * task.num_workers)]
    loader = session.shard(DataLoader(pool, batch_size=1, collate_fn=lambda batch: batch[0]))
    while True:
        yield from loader
