"""A model and its optimizers as they are before training: facts, owners, and the first plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from parallax.config import Config
from parallax.engine.ownership import owners_of
from parallax.engine.row_optimizer import refuse_closures, updater_of
from parallax.engine.table_set import Owners
from parallax.planning.analysis import Facts, analyse, refuse_early_steps, refuse_unsupported
from parallax.planning.plan import ParameterPlan, Plan, Route, RowRule
from parallax.planning.planner import Updater, make_plan


@dataclass(frozen=True)
class TrainedModel:
    """What set-up needs to know of the model."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    facts: Sequence[Facts]
    owners: Owners
    updaters: Mapping[str, Updater]
    """By parameter: what its optimizer does with rows."""
    plan: Plan

    @staticmethod
    def of(
        model: nn.Module, optimizers: Sequence[Optimizer], config: Config, num_workers: int
    ) -> TrainedModel:
        """Analyse a model and plan its routes; refuse what would train incorrectly."""
        owners = owners_of(model, optimizers)
        facts = analyse(model)
        for each in optimizers:
            refuse_closures(each, num_workers)
        if num_workers > 1:
            refuse_unsupported(model)
            refuse_early_steps(model)
        updaters = _updaters(facts, owners, config)
        plan = make_plan(facts, updaters, config, num_workers)
        return TrainedModel(model, optimizers, facts, owners, updaters, plan)

    @property
    def tables(self) -> list[ParameterPlan]:
        """The parameters that are sharded, or may be once their use is known."""
        routes = (Route.SHARDED, Route.OBSERVED)
        return [line for line in self.plan.parameters if line.route in routes]

    @property
    def paddings(self) -> dict[str, Sequence[int]]:
        """By parameter: its padding rows."""
        return {fact.name: fact.padding_rows for fact in self.facts}

    @property
    def row_rules(self) -> dict[str, RowRule | None]:
        """By parameter: which of its rows an update changes."""
        return {line.name: line.row_rule for line in self.plan.parameters}

    def movable(self, config: Config) -> list[str]:
        """Return the parameters whose route may change: both routes give the same result."""
        return [
            name
            for name, updater in self.updaters.items()
            if config.replan
            and not self.plan[name].is_lazy
            and updater.takes_dense
            and config.route_of(name) is None
        ]

    def describe(self, config: Config) -> list[str]:
        """Return a line for each parameter, with everything that must be the same on all
        workers."""
        lines = []
        for fact in self.facts:
            line = self.plan[fact.name]
            group = self.owners.get(id(fact.parameter), (None, {}))[1]
            options = ", ".join(f"{k}={v!r}" for k, v in group.items() if k != "params")
            lines.append(
                f"parameter {fact.name!r} {line.shape} {fact.parameter.dtype}, {line.route.value}, "
                f"{'free' if config.route_of(fact.name) is None else 'forced'}, "
                f"{self.updaters[fact.name].name} with {options}"
            )
        return lines


def _updaters(facts: Sequence[Facts], owners: Owners, config: Config) -> dict[str, Updater]:
    absent = Updater("no optimizer")
    return {
        fact.name: updater_of(
            *owners[id(fact.parameter)],
            may_be_table=fact.may_be_table or config.route_of(fact.name) == Route.SHARDED,
        )
        if id(fact.parameter) in owners
        else absent
        for fact in facts
    }
