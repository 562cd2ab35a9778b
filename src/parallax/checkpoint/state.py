"""The live state of a training: everything that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.checkpoint.attached import Attached
from parallax.checkpoint.contents import Contents
from parallax.comm.peers import Peers
from parallax.data import Epochs, Loaders
from parallax.engine.row_optimizer import RowOptimizer
from parallax.engine.table_set import TableSet
from parallax.tables.table import Table


class TrainingState:
    """The model, its optimizers and tables, the position in the data, and what is attached."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        tables: TableSet,
        row_optimizers: Iterable[RowOptimizer],
        peers: Peers,
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.epochs = Epochs(warns=peers.rank == 0)
        self.loaders = Loaders(self.epochs)
        self.attached = Attached(warns=peers.rank == 0)
        self._tables = tables
        self._row_optimizers = list(row_optimizers)
        self._peers = peers

    def contents(self) -> Contents:
        """Return what a checkpoint of this moment holds."""
        for each in self._row_optimizers:
            each.swap_back()  # An exception in the last step may have left rows in an optimizer.
        return Contents(
            model=self.model,
            optimizers=self.optimizers,
            tables={id(table.parameter): table for table in self._tables.sharded},
            loaders=self.loaders.present,
            step=self._peers.step,
            epoch=self.loaders.epoch,
            attached=self.attached,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full state dict of the model on rank 0, and {} elsewhere. Collective."""
        found: dict[str, Tensor] = {}
        collected: dict[int, Tensor | None] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, Table) and id(value) not in collected:
                table = self._tables.by_id[id(value)]
                part = table.values("state_dict") if table.local else table.shard
                assert part is not None
                collected[id(value)] = part.clone() if table.local else table.collected(part)
            full = collected[id(value)] if isinstance(value, Table) else _detached(value)
            if self._peers.rank == 0 and full is not None:
                found[name] = full
        return found


def _detached(value: object) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
