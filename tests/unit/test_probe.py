"""Optimizers of other packages, tried on a small copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.engine.probe import keeps_gradient, why_not_elementwise
from parallax.engine.row_optimizer import updater_of
from parallax.planning.plan import RowRule

Rule = Callable[[Tensor, Tensor, dict[str, Any]], object]
"""Updates a parameter: its values, its gradient, its state."""


class Stepping(Optimizer):
    """Does what a function says, with each parameter."""

    def __init__(self, rule: Rule, lr: float = 0.1, params: Any = None) -> None:
        params = [nn.Parameter(torch.ones(8, 2))] if params is None else params
        super().__init__(params, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad * group["lr"], self.state[p])


def plain(values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    state["count"] = state.get("count", 0) + 1
    values.sub_(gradient + 0.01 * values)


def normed(values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient / gradient.norm().clamp(min=1.0))


def by_row(values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    state["sum"] = state.get("sum", 0.0) + gradient.square().mean(1)
    values.sub_(gradient / (1 + state["sum"][:, None]))


def summed(values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    state["norm"] = values.norm()
    values.sub_(gradient)


def drawn(values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient + torch.randn_like(values))


def unchanged(values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.clone().sub_(gradient)


def broken(values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    raise OSError("no such device")


def tried(optimizer: Optimizer) -> str | None:
    # Verdicts are kept for each class: here each rule is a class of its own.
    rule = getattr(optimizer, "rule", None)
    if rule is not None:
        optimizer.__class__ = type(rule.__name__, (Stepping,), {})
    return why_not_elementwise(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (plain, None),
        (normed, "needs the whole parameter"),
        (by_row, "state 'sum' that is not of the parameter's shape"),
        (summed, "state 'norm' that depends on the whole parameter"),
        (drawn, "needs the whole parameter"),
        (unchanged, "did not change a small copy"),
        (broken, "could not be tried on a small copy of a table (OSError: no such device)"),
    ],
)
def test_what_an_owner_can_step_alone(rule: Rule, why: str | None) -> None:
    found = tried(Stepping(rule))
    assert found is None if why is None else why in str(found)


def test_a_rate_of_zero_hides_nothing() -> None:
    """As in the first step of a warm-up."""
    assert "needs the whole parameter" in str(tried(Stepping(normed, lr=0.0)))
    assert tried(Stepping(plain, lr=0.0)) is None


@pytest.mark.parametrize(
    ("make", "is_elementwise"),
    [
        (lambda p: torch.optim.ASGD(p), True),
        (lambda p: torch.optim.Adafactor(p), False),
        (lambda p: torch.optim.Muon(p), False),
    ],
)
def test_torchs_own(make: Callable[[Any], Optimizer], is_elementwise: bool) -> None:
    optimizer = make([nn.Parameter(torch.ones(8, 2))])
    assert (tried(optimizer) is None) == is_elementwise


class Wrapping(Stepping):
    """Has another optimizer step, whose parameters a small copy could not replace."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)


def test_wrappers_of_optimizers_are_not_tried() -> None:
    assert "it holds parameters or another optimizer" in str(tried(Wrapping()))


def test_the_script_does_not_notice() -> None:
    parameter = nn.Parameter(torch.ones(8, 2))
    optimizer = Stepping(drawn, params=[parameter])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # It wraps `step` of the object.
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    random = torch.get_rng_state()
    tried(optimizer)
    keeps_gradient(optimizer, optimizer.param_groups[0], parameter)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(parameter, torch.ones(8, 2))
    assert not optimizer.state
    assert not called


@pytest.mark.parametrize(
    ("make", "is_kept"),
    [
        (lambda p: torch.optim.Adam(p), True),
        (lambda p: torch.optim.AdamW(p, fused=True), True),
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), True),
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, foreach=True), False),
        (lambda p: torch.optim.Adam(p, capturable=True), False),  # It raises on CPUs.
    ],
)
def test_who_writes_into_gradients(make: Callable[[Any], Optimizer], is_kept: bool) -> None:
    parameter = nn.Parameter(torch.ones(8, 2))
    optimizer = make([parameter])
    assert keeps_gradient(optimizer, optimizer.param_groups[0], parameter) == is_kept


def test_a_subclass_is_known_by_its_step() -> None:
    class Renamed(torch.optim.AdamW):
        """Without a step of its own."""

    class Changed(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    normed(p.data, p.grad, {})

    parameters = [nn.Parameter(torch.ones(8, 2))]
    renamed, changed = Renamed(parameters), Changed(parameters)
    found = updater_of(renamed, renamed.param_groups[0])
    assert (found.rule, found.refusal, found.may_be_lazy) == (RowRule.EVERY_ROW, "", True)
    assert "needs the whole" in updater_of(changed, changed.param_groups[0]).refusal
