"""The user's own optimizer on the rows that a step touched, and what that means for each kind.

Before `step()` the touched rows of a group and of its state are gathered into a small dense
parameter that takes the tables' place in the optimizer; it steps on that, with its
hyper-parameters of the moment; then rows and state are scattered back. See tables/group.py.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallax.errors import ConfigError, UnsupportedError
from parallax.planner import RowRule, Updater
from parallax.tables.group import RowUpdate, TableGroup

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


class RowOptimizer:
    """Lets one optimizer step on the touched rows of its tables.

    While it steps, a small dense parameter with those rows stands in the place of a group's first
    table, with the optimizer's options of the moment.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._updates: list[tuple[TableGroup, RowUpdate]] = []
        self._away: list[tuple[list[Any], int, nn.Parameter]] = []
        """Group, place and table of what has been replaced."""
        self._state_ids: list[int] = []
        """What the optimizer's state was made of after the last update."""

    def swap_in(self, groups: Sequence[TableGroup]) -> None:
        """Put the touched rows of each group in its tables' place."""
        is_known = self._state_ids == self._list_state()
        for group in groups:
            for update in group.begin_update(is_state_known=is_known):
                self._updates.append((group, update))
                members = {id(group.parameters[table]) for table in update.tables}
                self._swap(members, update.parameter)

    def swap_out(self) -> set[str]:
        """Write the stepped rows and their state back; return the tables that were updated."""
        names = set[str]()
        for _, update in self._updates:
            update.write_back()
            names |= update.names
        self._put_back()
        self._state_ids = self._list_state()
        return names

    def _list_state(self) -> list[int]:
        """Return the identity of every tensor in the state: a script may have put others there."""
        states = self.optimizer.state.values()
        return list(map(id, itertools.chain.from_iterable(map(dict.values, states))))

    def swap_back(self, *_: object) -> None:
        """Give up a step that an exception ended; a gradient that was zeroed since is zero."""
        for group, update in self._updates:
            if update.parameter.grad is None:
                for table in update.tables:
                    group.zero(table)
        self._put_back()

    def _put_back(self) -> None:
        for parameters, place, parameter in self._away:
            parameters[place] = parameter
        for _, update in self._updates:
            update.discard()
        self._away.clear()
        self._updates.clear()

    def _swap(self, members: set[int], replacement: nn.Parameter) -> None:
        for group in self.optimizer.param_groups:
            parameters = group["params"]
            for place, parameter in enumerate(parameters):
                if id(parameter) in members:
                    self._away.append((parameters, place, parameter))
                    parameters[place] = replacement
                    replacement = _NOTHING  # The others' rows are in the first one's place.


_NOTHING = nn.Parameter(torch.empty(0))
"""In the place of tables whose rows step elsewhere: it has no gradient, so nothing happens."""
