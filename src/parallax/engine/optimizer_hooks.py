"""What happens before and after each `optimizer.step()`. Torch calls these hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from parallax.engine.engine import Engine
from parallax.engine.trained_model import TrainedModel
from parallax.errors import ConfigError
from parallax.planning.adaptive_plan import AdaptivePlan

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of `optimizer.step()`."""


class StepObserver(Protocol):
    """Who follows the progress of the training."""

    def end_step(self) -> None:
        """Called when the number of steps has grown."""

    def after_step(self, *, is_complete: bool) -> None:
        """Called after an optimizer's step. `is_complete`: all optimizers have made as many."""


class OptimizerHooks:
    """Hooks on all optimizers of a session, from the constructor until `remove()`."""

    def __init__(
        self,
        trained: TrainedModel,
        engine: Engine,
        adaptive_plan: AdaptivePlan,
        observer: StepObserver,
    ) -> None:
        self._owners = trained.owners
        self._engine = engine
        self._peers = engine.peers
        self._adaptive_plan = adaptive_plan
        self._observer = observer
        self._steps = {id(each): 0 for each in trained.optimizers}
        """By optimizer: its number of steps."""
        self._reductions = {id(each): 0 for each in trained.optimizers}
        """By optimizer: the number of reductions at its last step."""
        self._have_stepped: set[int] = set()
        """Optimizers that have stepped since all of them had."""
        self._handles: list[Any] = []
        for each in trained.optimizers:
            swap_back = engine.row_optimizers[id(each)].swap_back
            self._handles += [
                each.register_step_pre_hook(self._before_step),
                each.register_step_post_hook(self._after_step),
                each.register_state_dict_pre_hook(swap_back),
                each.register_load_state_dict_pre_hook(swap_back),
            ]

    def remove(self) -> None:
        """Remove the hooks from the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def set_step(self, step: int) -> None:
        """Continue with this number of steps: a checkpoint was loaded."""
        self._steps = dict.fromkeys(self._steps, step)

    def reduce_pending(self) -> None:
        """Reduce gradients that no backward has reduced. Collective."""
        self._engine.backward.catch_up(max(self._reductions.values()))

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Called by torch before each `optimizer.step()`. Collective."""
        key = id(optimizer)
        self._engine.row_optimizers[key].swap_back()  # An exception may have ended the last step.
        self._check_groups(optimizer)
        args, kwargs = _run_closure(args, kwargs)
        self._engine.backward.catch_up(self._reductions[key])
        self._reductions[key] = self._engine.backward.num_reductions
        self._engine.step.begin_update(optimizer)
        return args, kwargs

    def _check_groups(self, optimizer: Optimizer) -> None:
        """Refuse new parameters; follow hyper-parameters that were changed."""
        for group in optimizer.param_groups:
            parameters = group["params"]
            if not self._owners.keys() >= set(map(id, parameters)):
                _refuse_new(optimizer, parameters, self._owners)
        self._engine.follow_options(optimizer)

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Called by torch after each `optimizer.step()`. Collective."""
        key = id(optimizer)
        self._engine.step.update(optimizer)
        self._steps[key] += 1
        if self._steps[key] > self._peers.step:
            self._end_step()
        self._have_stepped.add(key)
        if len(self._have_stepped) == len(self._steps):  # Some may step more often than others.
            self._have_stepped.clear()
            self._engine.settle()
            self._replan()
        self._observer.after_step(is_complete=self._steps[key] == min(self._steps.values()))

    def _end_step(self) -> None:
        self._engine.end_step()
        self._peers.next_step()
        self._observer.end_step()
        self._peers.ledger.close_step()
        self._adaptive_plan.end_step()

    def _replan(self) -> None:
        engine = self._engine
        num_reductions = engine.backward.num_reductions
        for change in self._adaptive_plan.after_step(engine.tables.by_name, num_reductions):
            engine.move(change)


def _refuse_new(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], owners: Mapping[int, object]
) -> None:
    new = next(parameter for parameter in parameters if id(parameter) not in owners)
    raise ConfigError(
        f"{type(optimizer).__name__} got a parameter of shape {tuple(new.shape)} after "
        "parallelize(), which is not kept the same on all workers: give it all parameters before"
    )


def _run_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Run a closure before gradients are pushed; torch would run it inside `step()`."""
    offset = 1 if args and isinstance(args[0], Optimizer) else 0
    closure = kwargs.get("closure", args[offset] if len(args) > offset else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:offset], {**kwargs, "closure": lambda: loss}
