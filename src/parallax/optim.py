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
from parallax.shard import joined, put_rows
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


def check_rule(table: str, rule: RowRule, now: Updater) -> None:
    """Refuse an option, set since the plan was made, that touched rows alone cannot follow."""
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
    """The tables of one optimizer, and their stand-ins while it steps.

    [Note: together] Small tables of a kind step as one parameter, because an optimizer's dozen of
    operations on a few hundred rows take longer to call than to run. All of a kind have the same
    row, options and state, down to the number of their steps, so each element is updated as alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._stand_ins: list[_StandIn] = []
        self._away: list[tuple[list[Any], int, nn.Parameter]] = []
        """Group, place and table of what has been replaced."""

    def swap_in(self, tables: dict[int, TableRows]) -> None:
        """Put the touched rows of each table with a gradient in its place."""
        for group in self.optimizer.param_groups:
            kinds: dict[object, list[tuple[int, TableRows]]] = {}
            for place, parameter in enumerate(group["params"]):
                table = tables.get(id(parameter))
                if table is not None and table.received is not None:
                    kinds.setdefault(self._kind(table), []).append((place, table))
            for members in kinds.values():
                self._swap(group["params"], members)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Write the stepped rows and their state back."""
        for stand_in in self._stand_ins:
            stand_in.scatter(self.optimizer.state)
        self._put_back()

    def swap_back(self, *_: object) -> None:
        """Give up a step that an exception ended; a gradient that was zeroed since is zero."""
        for stand_in in self._stand_ins:
            if stand_in.rows.grad is None:
                stand_in.zero()
        self._put_back()

    def _put_back(self) -> None:
        for parameters, place, parameter in self._away:
            parameters[place] = parameter
        for stand_in in self._stand_ins:
            self.optimizer.state.pop(stand_in.rows, None)
        self._away.clear()
        self._stand_ins.clear()

    def _swap(self, parameters: list[Any], members: list[tuple[int, TableRows]]) -> None:
        stand_in = _StandIn([table for _, table in members], self.optimizer)
        self._stand_ins.append(stand_in)
        replacement = stand_in.rows
        for place, table in members:
            self._away.append((parameters, place, table.parameter))
            parameters[place] = replacement
            replacement = _NOTHING  # The others' rows are in the first one's place.

    def _kind(self, table: TableRows) -> object:
        """Tables of a kind can step together. See [Note: together]."""
        assert table.shard is not None
        assert table.received is not None
        state = self.optimizer.state.get(table.parameter, {})
        _place_state(table, state)
        if table.received.values.nbytes > _MAX_TOGETHER_BYTES:
            return table.name
        kind: list[object] = [table.shard.dtype, table.shard.shape[1:], table.shard.device]
        for key, value in state.items():
            if is_by_row(value, table.shard):
                kind += [key, value.dtype]
            elif isinstance(value, Tensor) and (value.numel() != 1 or value.device.type != "cpu"):
                return table.name  # To read it would make a GPU wait.
            else:
                kind += [key, float(value) if isinstance(value, Tensor) else value]
        return tuple(kind)


class _StandIn:
    """A dense parameter that steps for the touched rows of some tables."""

    def __init__(self, tables: list[TableRows], optimizer: Optimizer) -> None:
        self._tables = tables
        self._shards = [table.shard for table in tables if table.shard is not None]
        received = [table.received for table in tables if table.received is not None]
        self._places = [parcel.slots for parcel in received]
        self._sizes = [places.size(0) for places in self._places]
        self.rows = nn.Parameter(self._gathered(self._shards))
        gradient = joined([parcel.values for parcel in received])
        sparse = isinstance(optimizer, torch.optim.SparseAdam)
        self.rows.grad = _as_sparse(gradient) if sparse else gradient
        states = [optimizer.state.get(table.parameter, {}) for table in tables]
        if states[0]:
            optimizer.state[self.rows] = {
                key: self._gathered([state[key] for state in states])
                if is_by_row(value, self._shards[0])
                else _copied(value)
                for key, value in states[0].items()
            }

    def scatter(self, states: dict[Any, dict[str, Any]]) -> None:
        """Write its rows and its state to the tables'."""
        self._put(self._shards, self.rows.detach())
        own = [states[table.parameter] for table in self._tables]
        for key, value in states.get(self.rows, {}).items():
            if not is_by_row(value, self.rows):
                for state in own:  # Each has its own, to count on if they part ways.
                    state[key] = _copied(value)
                continue
            for state, shard in zip(own, self._shards, strict=True):
                if not isinstance(state.get(key), Tensor):
                    state[key] = torch.zeros_like(shard, dtype=value.dtype)
            self._put([state[key] for state in own], value)
        for table in self._tables:
            table.updated()

    def zero(self) -> None:
        for table in self._tables:
            table.zero()

    def _gathered(self, whole: list[Tensor]) -> Tensor:
        """The touched rows of all tables."""
        if len(whole) == 1:
            return whole[0].index_select(0, self._places[0])
        rows = whole[0].new_empty((sum(self._sizes), *whole[0].shape[1:]))
        parts = rows.split_with_sizes(self._sizes)
        for source, places, part in zip(whole, self._places, parts, strict=True):
            torch.index_select(source, 0, places, out=part)
        return rows

    def _put(self, whole: list[Tensor], rows: Tensor) -> None:
        parts = rows.split_with_sizes(self._sizes)
        for target, places, part in zip(whole, self._places, parts, strict=True):
            put_rows(target, places, part)


_NOTHING = nn.Parameter(torch.empty(0))
"""In the place of tables whose rows step elsewhere: it has no gradient, so nothing happens."""

_MAX_TOGETHER_BYTES = 2**20
"""Of a table's touched rows. Larger ones gain nothing, and would push each other out of caches."""


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _as_sparse(values: Tensor) -> Tensor:
    places = torch.arange(len(values), device=values.device)[None]
    return torch.sparse_coo_tensor(
        places, values, values.shape, is_coalesced=True, check_invariants=False
    )


def _place_state(table: TableRows, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict` may have brought the state of all rows."""
    assert table.shard is not None
    for key, value in state.items():
        if not is_by_row(value, table.shard) and is_by_row(value, table.parameter):
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
