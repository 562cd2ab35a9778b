"""The row step: the user's own optimizer, on the rows that a step touched.

Before `step()` the touched rows of a shard and of its state are gathered into a small dense
parameter that takes the table's place in its group; the optimizer steps on that, with its
hyper-parameters of the moment; then rows and state are scattered back.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.errors import ConfigError, UnsupportedError
from parallax.planner import RowRule, Updater
from parallax.sparse import TableRows

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SparseAdam,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.Adamax,
)
"""Each element's update depends on that element alone, and its state starts at zero (or, for
Adagrad, lies there from the start)."""


def updater_of(optimizer: Optimizer, group: dict[str, Any]) -> Updater:
    """What updating only touched rows means for a parameter of this group."""
    name = type(optimizer).__name__
    kind: Any = type(optimizer)
    if not _is_elementwise(kind) or group.get("differentiable"):
        return Updater(name, RowRule.REFUSED)
    decays = bool(group.get("weight_decay"))
    if isinstance(optimizer, torch.optim.SparseAdam):
        return Updater(name, RowRule.EXACT, takes_sparse=True, takes_dense=False)
    if isinstance(optimizer, torch.optim.Adagrad):
        adagrad = f"{name} with weight_decay" if decays else name
        return Updater(adagrad, RowRule.LAZY if decays else RowRule.EXACT, takes_sparse=not decays)
    if isinstance(optimizer, torch.optim.SGD):
        plain = not decays and not group.get("momentum")
        return Updater(
            _sgd(group), RowRule.EXACT if plain else RowRule.LAZY, takes_sparse=not decays
        )
    return Updater(name, RowRule.LAZY)


@functools.cache
def _is_elementwise(kind: type[Optimizer]) -> bool:
    # A subclass with a step of its own may do anything; torch wraps `step` for its profiler.
    step = inspect.unwrap(kind.step)
    return any(step is inspect.unwrap(cls.step) for cls in _ELEMENTWISE)


def check_rule(table: str, rule: RowRule, optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Refuse an option, set since the plan was made, that touched rows alone cannot follow."""
    now = updater_of(optimizer, group)
    if rule is RowRule.EXACT and now.rule is not RowRule.EXACT:
        raise ConfigError(
            f"table {table!r} was sharded because its optimizer left untouched rows alone, but now "
            f"it is {now.name}, which does not (a scheduler may have set an option, as OneCycleLR "
            "does with momentum). Set it before parallelize(), or say "
            f"lazy=[{table!r}] or routes={{{table!r}: 'all-reduce'}}"
        )


def refuse_dense(name: str, optimizer: Optimizer, why: str) -> None:
    """SparseAdam takes sparse gradients only."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            f"{name!r} gets a dense gradient ({why}), which SparseAdam does not take: use Adam "
            "for it"
        )


def _sgd(group: dict[str, Any]) -> str:
    options = [option for option in ("momentum", "weight_decay") if group.get(option)]
    return "SGD" + (f" with {' and '.join(options)}" if options else "")


def refuse_closures(optimizer: Optimizer, num_workers: int) -> None:
    """LBFGS evaluates the model as often as this worker's own losses ask for."""
    if isinstance(optimizer, torch.optim.LBFGS) and num_workers > 1:
        raise UnsupportedError(
            "LBFGS steps by each worker's own losses and would leave the workers out of step; "
            "tables cannot be updated by it either. Use SGD, Adagrad, Adam or another optimizer "
            "that steps once a call"
        )


class RowStep:
    """The tables of one optimizer, and their stand-ins while it steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._swapped: list[tuple[TableRows, dict[str, Any], int, nn.Parameter]] = []

    def swap_in(self, tables: dict[int, TableRows]) -> None:
        """Put the touched rows of each table with a gradient in its place."""
        self.swap_back()  # an exception in the last step may have left some there
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                table = tables.get(id(parameter))
                if table is not None and table.received is not None:
                    self._swap(table, group, index)

    def swap_out(self) -> None:
        """Write the stepped rows and their state back."""
        for table, _, _, rows in self._swapped:
            self._scatter(table, rows)
            table.updated()
        self.swap_back()

    def swap_back(self) -> None:
        for table, group, index, rows in self._swapped:
            group["params"][index] = table.parameter
            self.optimizer.state.pop(rows, None)
        self._swapped.clear()

    def _swap(self, table: TableRows, group: dict[str, Any], index: int) -> None:
        assert table.shard is not None
        assert table.received is not None
        places = table.received.slots
        rows = nn.Parameter(table.shard.index_select(0, places))
        rows.grad = self._gradient(table.received.values)
        state = self.optimizer.state.get(table.parameter)
        if state:
            self._place_state(table, state)
            self.optimizer.state[rows] = {
                key: value.index_select(0, places) if is_by_row(value, table.shard) else value
                for key, value in state.items()
            }
        group["params"][index] = rows
        self._swapped.append((table, group, index, rows))

    def _gradient(self, values: Tensor) -> Tensor:
        if not isinstance(self.optimizer, torch.optim.SparseAdam):
            return values
        places = torch.arange(len(values), device=values.device)[None]
        return torch.sparse_coo_tensor(
            places, values, values.shape, is_coalesced=True, check_invariants=False
        )

    @torch.no_grad()
    def _scatter(self, table: TableRows, rows: nn.Parameter) -> None:
        assert table.shard is not None
        assert table.received is not None
        places = table.received.slots
        table.shard.index_copy_(0, places, rows.detach())
        state = self.optimizer.state[table.parameter]
        for key, value in self.optimizer.state.get(rows, {}).items():
            if not is_by_row(value, rows):
                state[key] = value
                continue
            if not isinstance(state.get(key), Tensor):
                shape = (len(table.shard), *value.shape[1:])
                state[key] = torch.zeros(shape, dtype=value.dtype, device=value.device)
            state[key].index_copy_(0, places, value)

    def _place_state(self, table: TableRows, state: dict[str, Any]) -> None:
        """`optimizer.load_state_dict` may have brought the state of all rows."""
        assert table.shard is not None
        for key, value in state.items():
            if is_by_row(value, table.parameter) and value.shape != table.shard.shape:
                state[key] = table.own_part(value)


def is_by_row(value: object, like: Tensor) -> bool:
    """Whether a part of an optimizer's state has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == like.shape


def shard_state(optimizer: Optimizer, table: TableRows) -> None:
    """Keep only this owner's rows of a parameter's state."""
    state = optimizer.state.get(table.parameter, {})
    for key, value in state.items():
        if is_by_row(value, table.parameter):
            state[key] = (
                _start_state(optimizer, table, value) if value.is_meta else table.own_part(value)
            )


def gather_state(optimizer: Optimizer, table: TableRows) -> None:
    """The opposite: each worker gets the state of all rows."""
    assert table.shard is not None
    state = optimizer.state.get(table.parameter, {})
    for key in sorted(key for key, value in state.items() if is_by_row(value, table.shard)):
        state[key] = table.gathered(state[key], f"the optimizer's {key}")


def _start_state(optimizer: Optimizer, table: TableRows, meta: Tensor) -> Tensor:
    """Adagrad makes its state with the optimizer, on the meta device if the table is there."""
    assert table.shard is not None
    value = optimizer.defaults.get("initial_accumulator_value", 0.0)
    return torch.full(table.shard.shape, value, dtype=meta.dtype, device=table.shard.device)
