"""A workload of which the hottest rows are parameters of their own.

What replicating hot rows would give, without an engine that does: the first rows of each table are
another table, small enough to be all-reduced, and ids go to the one that has their row. Layers get
the rows in two parts, so they have to be emulated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.workloads.workload import Batch, Table, Workload

if TYPE_CHECKING:
    from torch import nn


class HotApart(Workload):
    """`whole`, with its tables first and the hot ones after them, in the same order."""

    def __init__(self, whole: Workload, num_hot: tuple[int, ...], *, is_emulated: bool) -> None:
        if not is_emulated:
            raise ValueError("hot rows apart: layers have to be emulated, take --emulated")
        if len(num_hot) != len(whole.tables):
            raise ValueError(
                f"hot rows of {len(num_hot)} tables are given; {whole.name} has {len(whole.tables)}"
            )
        self._whole, self._num_hot = whole, num_hot
        self.name, self.samples, self.compute_ms = whole.name, whole.samples, whole.compute_ms
        self.learning_rate, self.accumulator = whole.learning_rate, whole.accumulator
        self.adamw = whole.adamw
        hot = (
            Table(f"{table.name}-hot", count, table.width)
            for table, count in zip(whole.tables, num_hot, strict=True)
        )
        self.tables = (*whole.tables, *hot)

    def batch(self, step: int, rank: int) -> Batch:
        ids, others = self._whole.batch(step, rank)
        pairs = list(zip(ids, self._num_hot, strict=True))
        cold = [each[each >= count] for each, count in pairs]
        return Batch([*cold, *(each[each < count] for each, count in pairs)], others)

    def layers(self) -> nn.Module:
        return self._whole.layers()
