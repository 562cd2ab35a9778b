"""The user's own optimizer on the rows of tables, and which rule each kind of optimizer needs.

Before `step()` a stand-in takes the tables' place in the optimizer: a small parameter with the
touched rows, or the owner's rows themselves. The optimizer steps on it, with its hyper-parameters
of the moment. See [Note: row rules] in tables/group.py.

[Note: fused] On CPUs torch's default for Adam is a loop of whole-tensor operations, 12 to 16 times
as slow as its fused kernel on a large shard. Where the user chose neither `fused` nor `foreach`, a
stand-in for every row is stepped by the fused kernel; results differ in the last bit. For that it
is in a group of its own, with the same options, which the optimizer has only while it steps.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallax.engine.probe import keeps_gradient, why_not_elementwise
from parallax.errors import ConfigError, UnsupportedError
from parallax.planning.plan import RowRule
from parallax.planning.planner import Updater
from parallax.tables.group import TableGroup, Update, has_zero_gradient

_STARTS_AT_ZERO = (
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
Adagrad, lies there from the start). So these can step on gathered rows."""
_ELEMENTWISE = (*_STARTS_AT_ZERO, torch.optim.Rprop)
"""Each element's update depends on that element alone."""
_HAS_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_FUSED_DTYPES = (torch.float32, torch.float64)
"""Of half precision the fused kernel keeps more digits inside, so that results would differ."""


def updater_of(
    optimizer: Optimizer, group: dict[str, Any], *, may_be_table: bool = True
) -> Updater:
    """Return how an optimizer updates the rows of a table in this group. An optimizer that is not
    torch's own is tried on a small copy, but only for what may be a table."""
    name = type(optimizer).__name__
    kind: Any = type(optimizer)
    if group.get("differentiable"):
        return Updater(name, refusal="with differentiable=True records its own step")
    if not _has_step_of(kind, _ELEMENTWISE):
        if not may_be_table:
            return Updater(name, refusal="was not tried", may_be_lazy=False)
        why = why_not_elementwise(optimizer, group)
        return Updater(name, RowRule.EVERY_ROW, refusal=why or "", may_be_lazy=False)
    decays = bool(group.get("weight_decay"))
    if isinstance(optimizer, torch.optim.SparseAdam):
        return Updater(name, takes_dense=False)
    if isinstance(optimizer, torch.optim.Adagrad):
        if not decays:
            return Updater(name)
        return Updater(f"{name} with weight_decay", RowRule.EVERY_ROW, refuses_sparse=True)
    if isinstance(optimizer, torch.optim.SGD):
        is_plain = not decays and not group.get("momentum")
        rule = RowRule.TOUCHED_ROWS if is_plain else RowRule.EVERY_ROW
        return Updater(_sgd(group), rule, refuses_sparse=decays)
    may_be_lazy = _has_step_of(kind, _STARTS_AT_ZERO)
    return Updater(name, RowRule.EVERY_ROW, may_be_lazy=may_be_lazy, refuses_sparse=True)


@functools.cache
def _has_step_of(kind: type[Optimizer], known: tuple[type[Optimizer], ...]) -> bool:
    # A subclass with a step of its own may do anything; torch wraps `step` for its profiler.
    step = inspect.unwrap(kind.step)
    return any(step is inspect.unwrap(cls.step) for cls in known)


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
    """Lets one optimizer step on the rows of its tables.

    While it steps, a stand-in is in the place of the first of the tables that it has rows of.
    """

    def __init__(self, optimizer: Optimizer, is_lazy: Callable[[str], bool]) -> None:
        """`is_lazy(name)`: the user chose to update only touched rows of this table."""
        self.optimizer = optimizer
        self._is_lazy = is_lazy
        self._updates: list[tuple[TableGroup, Update]] = []
        self._away: list[tuple[list[Any], int, nn.Parameter]] = []
        """Group, place and table of what has been replaced."""
        self._state_ids: list[int] = []
        """What the optimizer's state was made of after the last update."""
        self._fused: list[dict[str, Any]] = []
        """Groups that the optimizer has only while it steps. See [Note: fused]."""

    @property
    def is_stepping(self) -> bool:
        """Whether stand-ins are in the place of tables; also after a step that raised."""
        return bool(self._updates)

    def follow_options(self, groups: Sequence[TableGroup]) -> set[str]:
        """Give groups the rule that their options of the moment need. Return the names of the
        tables whose rule has changed; it is the same on all workers.

        A scheduler may set an option later, as OneCycleLR does with momentum. A group for which
        every row changes keeps that rule, because it is exact for any options.
        """
        changed = set[str]()
        for options in self.optimizer.param_groups:
            members = set(map(id, options["params"])) if groups else set()
            here = [group for group in groups if id(group.parameters[0]) in members]
            if not here:
                continue
            updater = updater_of(self.optimizer, options)
            if updater.rule is RowRule.TOUCHED_ROWS and not updater.refusal:
                continue
            for group in here:
                if updater.refusal:
                    _refuse_options(group, updater)
                if group.rule is RowRule.TOUCHED_ROWS and self._takes_every_row(group, updater):
                    group.rule = RowRule.EVERY_ROW
                    changed.update(group.names)
        return changed

    def _takes_every_row(self, group: TableGroup, updater: Updater) -> bool:
        lazy = [name for name in group.names if self._is_lazy(name)]
        if lazy and len(lazy) < len(group.names):
            others = sorted(set(group.names) - set(lazy))
            raise ConfigError(
                f"tables {lazy[0]!r} (lazy) and {others[0]!r} (not lazy) were updated together. "
                f"Since then their optimizer has become {updater.name}, which changes "
                "untouched rows too. Set this option before parallelize(), or put them into "
                "different groups of the optimizer"
            )
        return not lazy

    def swap_in(self, groups: Sequence[TableGroup]) -> None:
        """Put stand-ins in the place of the tables that have a gradient."""
        is_known = self._state_ids == self._list_state()
        for group in groups:
            options = self._options_for_fused(group)
            for update in group.begin_update(is_state_known=is_known):
                self._updates.append((group, update))
                members = {id(group.parameters[table]) for table in update.tables}
                if options is None:
                    self._swap(members, update.parameter)
                else:
                    self._swap(members, _NOTHING)
                    self._fused.append({**options, "params": [update.parameter], "fused": True})
        self.optimizer.param_groups.extend(self._fused)

    def swap_out(self) -> set[str]:
        """Take the stepped rows and their state over; return the tables that were updated."""
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
        """Give up a step that an exception ended. A script may have dropped or zeroed gradients
        since, of the stand-ins."""
        for group, update in self._updates:
            is_dropped = update.parameter.grad is None
            if is_dropped or has_zero_gradient(update):
                for table in update.tables:
                    group.drop(table) if is_dropped else group.zero(table)
        self._put_back()

    def _options_for_fused(self, group: TableGroup) -> dict[str, Any] | None:
        """Return the options of a group's tables, if the fused kernel may step on its rows."""
        kind: Any = type(self.optimizer)
        if group.rule is not RowRule.EVERY_ROW or not _has_step_of(kind, _HAS_FUSED):
            return None
        if group.rows.device.type != "cpu" or group.rows.dtype not in _FUSED_DTYPES:
            return None
        options = options_of(self.optimizer, group.parameters[0])
        steps = [self.optimizer.state.get(p, {}).get("step") for p in group.parameters]
        # The kernel wants counters of float32, which torch makes unless the default is changed.
        is_float32 = torch.get_default_dtype() is torch.float32 and all(
            step is None or getattr(step, "dtype", None) is torch.float32 for step in steps
        )
        return options if is_float32 and _leaves_kernel_open(options) else None

    def _put_back(self) -> None:
        if self._fused:
            groups, extra = self.optimizer.param_groups, set(map(id, self._fused))
            groups[:] = [group for group in groups if id(group) not in extra]
            self._fused.clear()
        for parameters, place, parameter in self._away:
            parameters[place] = parameter
        self.optimizer.state.pop(_NOTHING, None)  # Some optimizers make state for any parameter.
        stepped = dict.fromkeys(group for group, _ in self._updates)
        for _, update in self._updates:
            update.discard()
        for group in stepped:
            if group.rule is RowRule.EVERY_ROW:
                options = options_of(self.optimizer, group.parameters[0])
                is_kept = keeps_gradient(self.optimizer, options, group.rows)
                group.end_update(is_gradient_kept=is_kept)
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


def _leaves_kernel_open(options: dict[str, Any]) -> bool:
    """Whether the user chose no implementation, and no option that the fused one lacks."""
    if options.get("fused") is not None or options.get("foreach") is not None:
        return False
    if options.get("capturable") or options.get("differentiable"):
        return False
    numbers = (options.get("lr"), *options.get("betas", ()))
    return all(isinstance(number, int | float) for number in numbers)


def options_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the group of the optimizer that has this parameter."""
    return next(
        group
        for group in optimizer.param_groups
        if any(each is parameter for each in group["params"])
    )


def _refuse_options(group: TableGroup, updater: Updater) -> None:
    raise ConfigError(
        f"table {group.names[0]!r} is sharded, but since parallelize() an option was set with "
        f"which {updater.name} {updater.refusal}. Set it before parallelize(), or say "
        f"routes={{{group.names[0]!r}: 'all-reduce'}}"
    )


_NOTHING = nn.Parameter(torch.empty(0))
"""In the place of tables whose rows step elsewhere: it has no gradient, so nothing happens."""
