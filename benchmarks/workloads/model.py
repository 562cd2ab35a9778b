"""A workload as an ordinary torch model, and the emulated accelerator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads.workload import POOL, Batch, Table, Workload, pieces


class Rows(nn.Embedding):
    """A table as torch has them; on `meta` it is empty until `reset_parameters`."""

    def __init__(self, table: Table, *, sparse: bool, device: str) -> None:
        is_meta = device == "meta"
        self.table = table  # Before the base, which calls `reset_parameters`.
        super().__init__(
            table.num_rows,
            table.width,
            sparse=sparse,
            device=device if is_meta else None,
            _weight=None if is_meta else torch.from_numpy(table.start()),
        )

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            with torch.no_grad():
                self.weight.copy_(torch.from_numpy(self.table.start()))


class Model(nn.Module):
    """Tables and the layers behind them."""

    def __init__(
        self, workload: Workload, layers: nn.Module, *, sparse: bool, device: str = "cpu"
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            Rows(table, sparse=sparse, device=device) for table in workload.tables
        )
        self.layers = layers

    def forward(self, ids: list[Tensor], others: list[Tensor]) -> Tensor:
        rows = [table(of_table) for table, of_table in zip(self.tables, ids, strict=True)]
        loss: Tensor = self.layers(rows, others)
        return loss


def make_layers(workload: Workload, *, emulated: bool) -> nn.Module:
    """The same on every worker and in every engine."""
    torch.manual_seed(0)
    layers = workload.layers()
    return Accelerated(layers, workload.compute_ms / 1000) if emulated else layers


def batches(workload: Workload, rank: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """A worker's batches without end, made beforehand: reading data is not what is timed."""
    return cycle([tensors_of(workload.batch(step, rank)) for step in range(POOL)])


def tensors_of(batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    ids, others = ([torch.from_numpy(array) for array in part] for part in batch)
    return ids, others


class Accelerated(nn.Module):
    """Layers on an emulated accelerator: sleeps stand for their arithmetic, all else is real.

    Several workers that share a few cores spend nearly all their time computing, which hides what
    an exchange costs. Lookups, gradients of every parameter, their exchange and the optimizer's
    updates happen as always. Gradients come in pieces, the last layers' first and the rows' last,
    so that an engine can exchange some while others are computed. Figures made this way say so.
    """

    def __init__(self, layers: nn.Module, seconds: float) -> None:
        super().__init__()
        self.layers, self.seconds = layers, seconds

    def forward(self, rows: list[Tensor], others: list[Tensor]) -> Tensor:
        entering, loss = rows, torch.zeros(())
        of_layers = pieces(list(self.layers.parameters()), Tensor.numel)
        for piece in of_layers:
            seconds = self.seconds / len(of_layers)
            loss = _Compute.apply(seconds, loss, *entering, *piece)  # type: ignore[no-untyped-call]
            entering = []
        return loss


class _Compute(torch.autograd.Function):
    """A third of the time forward, two thirds backward; gradients are small constants."""

    @staticmethod
    def forward(ctx: Any, seconds: float, *inputs: Tensor) -> Tensor:
        ctx.seconds = seconds
        ctx.shapes = [tensor.shape for tensor in inputs]
        time.sleep(seconds / 3)
        return inputs[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds / 3)
        return None, *(torch.full(shape, 1e-4) for shape in ctx.shapes)
