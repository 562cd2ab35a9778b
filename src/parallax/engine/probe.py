"""Tries an optimizer on a small copy: whether its step works element by element.

An owner steps only its own rows, so a table can be sharded if stepping two halves apart gives what
stepping the whole gives. Torch's own optimizers are known; the name of another one says nothing.
Norms, means or factored averages over a whole parameter (LAMB, Adafactor, Prodigy) fail here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

_ROWS, _WIDTH, _STEPS = 6, 4, 5
_TOLERANCE = 1e-9
_SHARED = {"defaults", "param_groups", "state", "step"}
"""Attributes that a small copy has anew. Schedulers wrap `step` of the object itself."""

_verdicts: dict[Any, str | None] = {}
_keeps: dict[Any, bool] = {}


def why_not_elementwise(optimizer: Optimizer, options: Mapping[str, Any]) -> str | None:
    """Return why the rows of a table cannot be stepped by their owners; None if they can."""
    key = (type(optimizer), _signature(options))
    if key not in _verdicts:
        _verdicts[key] = _tried(optimizer, options)
    return _verdicts[key]


def keeps_gradient(optimizer: Optimizer, options: Mapping[str, Any], like: Tensor) -> bool:
    """Say whether a step leaves gradients as they are, on this device and for this dtype."""
    key = (type(optimizer), _signature(options), like.device, like.dtype)
    if key not in _keeps:
        _keeps[key] = _leaves_gradient(optimizer, options, like)
    return _keeps[key]


def _tried(optimizer: Optimizer, options: Mapping[str, Any]) -> str | None:
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return _compare(optimizer, options)
    except Exception as error:  # Of a stranger's step: anything can be raised.
        return f"could not be tried on a small copy of a table ({type(error).__name__}: {error})"


def _compare(optimizer: Optimizer, options: Mapping[str, Any]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_ROWS, _WIDTH, generator=generator, dtype=torch.float64)
    parts = [slice(0, _ROWS), slice(0, _ROWS // 2), slice(_ROWS // 2, _ROWS)]
    trials = [_Trial(optimizer, options, start[part].clone()) for part in parts]
    for number in range(_STEPS):
        # Parts of other sizes, up to what clipping would notice; rows and a half without any.
        gradient = torch.randn(start.shape, generator=generator, dtype=torch.float64)
        gradient[0] = 0.0
        gradient[_ROWS // 2 :] *= (1e-3, 1e3, 0.0, 1.0, 30.0)[number]
        for trial, part in zip(trials, parts, strict=True):
            trial.step(gradient[part].clone())
    whole, *halves = trials
    if torch.equal(whole.parameter, start):
        return "did not change a small copy of a table"
    if not _same(whole.parameter, [half.parameter for half in halves]):
        return "does not work element by element: it needs the whole parameter"
    return _state_problem(whole, halves)


def _state_problem(whole: _Trial, halves: list[_Trial]) -> str | None:
    """Say which part of the state an owner could not keep for its rows alone."""
    for key, value in whole.state.items():
        others = [half.state.get(key) for half in halves]
        if not isinstance(value, Tensor) or value.dim() == 0:
            if not all(_equal(value, other) for other in others):
                return f"has a state {key!r} that depends on the whole parameter"
        elif value.shape != whole.parameter.shape:
            return f"has a state {key!r} that is not of the parameter's shape"
        elif not _same(value, others):
            return f"has a state {key!r} that does not work element by element"
    return None


def _same(whole: Tensor, halves: list[Any]) -> bool:
    joined = torch.cat(halves)
    return torch.allclose(joined, whole, rtol=_TOLERANCE, atol=0.0, equal_nan=True)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.allclose(one.double(), other.double(), rtol=_TOLERANCE, atol=0.0)
    return bool(one == other)


def _leaves_gradient(optimizer: Optimizer, options: Mapping[str, Any], like: Tensor) -> bool:
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            start = torch.ones(_ROWS, _WIDTH, dtype=like.dtype, device=like.device)
            trial = _Trial(optimizer, options, start)
            for number in range(_STEPS):
                gradient = torch.full_like(start, number % 2)
                before = gradient.clone()
                trial.step(gradient)
                if not torch.equal(gradient, before):
                    return False
    except Exception:  # Of a stranger's step. All of the gradient is cleared then.
        return False
    return True


class _Trial:
    """A copy of an optimizer that has one small parameter."""

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any], start: Tensor) -> None:
        self.parameter = nn.Parameter(start)
        group = {key: _small(value) for key, value in options.items() if key != "params"}
        if not float(group.get("lr", 1.0)):  # As at the start of a warm-up.
            group["lr"] = 1e-2
        self._optimizer: Any = object.__new__(type(optimizer))
        self._optimizer.__dict__.update(
            {
                key: OrderedDict() if key.startswith("_optimizer_") else _small(value)
                for key, value in vars(optimizer).items()
                if key not in _SHARED
            },
            defaults=dict(optimizer.defaults),
            param_groups=[{**group, "params": [self.parameter]}],
            state=defaultdict(dict),
        )

    def step(self, gradient: Tensor) -> None:
        self.parameter.grad = gradient
        type(self._optimizer).step(self._optimizer)

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._optimizer.state.get(self.parameter, {})
        return found


def _small(value: Any) -> Any:
    """Return a copy of something small; refuse what may hold the model's parameters."""
    leaves = pytree.tree_leaves(value)
    if any(isinstance(leaf, Optimizer | nn.Module | nn.Parameter) for leaf in leaves):
        raise TypeError("it holds parameters or another optimizer")
    return copy.deepcopy(value)


def _signature(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what matters of options: schedules change numbers, and a zero switches parts off."""
    return tuple((key, _sign(value)) for key, value in options.items() if key != "params")


def _sign(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value != 0
    if isinstance(value, tuple | list):
        return tuple(map(_sign, value))
    return type(value)
