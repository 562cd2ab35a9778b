"""What a checkpoint is made of, as a session has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.checkpoint import generators
from parallax.checkpoint.attached import Attached
from parallax.checkpoint.plain import plain
from parallax.data import ShardedLoader
from parallax.engine.sparse_table import SparseTable


@dataclass(frozen=True)
class Earlier:
    """What has gone on since the moment that a checkpoint is of, as it was then."""

    random: dict[str, Any]
    buffers: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Only those that have."""


@dataclass(frozen=True)
class Contents:
    """What a session has to save, or to be filled."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    tables: Mapping[int, SparseTable]
    """Those that lie in shards, by the parameter's id."""
    loaders: Sequence[ShardedLoader]
    step: int
    epoch: int
    attached: Attached
    earlier: Earlier | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Each once, under its first name."""
        return dict(self.model.named_parameters())

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    @property
    def buffers_then(self) -> dict[str, Tensor]:
        """As they were at the moment that the checkpoint is of."""
        return {**self.buffers, **(self.earlier.buffers if self.earlier else {})}

    @property
    def random_then(self) -> dict[str, Any]:
        return self.earlier.random if self.earlier else generators.states()

    @property
    def keys(self) -> dict[str, str]:
        """The keys of the plain state dict, and the name of each one's parameter or buffer."""
        tensors: dict[str, Tensor] = {**self.parameters, **self.buffers}
        names = {id(tensor): name for name, tensor in tensors.items()}
        return {key: names[id(v)] for key, v in self._plain_state.items() if id(v) in names}

    @property
    def extra(self) -> dict[str, Any]:
        """What else the plain state dict has: modules' own `get_extra_state`."""
        keys = self.keys
        return {
            key: plain(value, f"{key!r} in the model's state dict")
            for key, value in self._plain_state.items()
            if key not in keys
        }

    @property
    def _plain_state(self) -> dict[str, Any]:
        return self.model.state_dict(keep_vars=True)

    def options(self, optimizer: Optimizer) -> dict[str, Any]:
        """The hyper-parameters of an optimizer, and which parameters each group has."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        kind = type(optimizer).__name__
        groups = []
        for group in optimizer.param_groups:
            options = {
                key: plain(value, f"option {key!r} of {kind}")
                for key, value in group.items()
                if key != "params"
            }
            groups.append({"options": options, "names": [names[id(p)] for p in group["params"]]})
        return {"class": kind, "groups": groups}


@dataclass(frozen=True)
class Restored:
    """What the session itself must take over from a checkpoint."""

    path: Path
    step: int
    num_workers: int
    """At which it was saved."""
    loaders: list[dict[str, Any]]
    left: list[int]
    """Which of them the script had left in the epoch."""
    epoch: int
    attached: dict[str, Any]
    options: list[list[dict[str, Any]]]
    """The hyper-parameters of each optimizer's groups."""
