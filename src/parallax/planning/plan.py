"""The plan: a route for each parameter, and why. Plain data, the same on every worker."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from parallax.observability.ledger import Record
from parallax.planning import cost
from parallax.planning.cost import Cluster
from parallax.planning.forecast import planned, work_of
from parallax.text import in_columns, size

_NOTICEABLE_BYTES = 32 << 20
"""Rows that an owner updates in each step: below this, updating all of them takes a few ms."""


class RowRule(str, enum.Enum):
    """Which rows of a sharded table a step changes. Under both only touched rows travel."""

    TOUCHED_ROWS = "touched rows"
    """The optimizer steps on the touched rows. Exact if a zero gradient changes nothing; else it is
    the user's choice (`lazy`)."""
    EVERY_ROW = "every row"
    """The owner steps its whole shard, with a gradient that is zero in untouched rows."""


class Route(str, enum.Enum):
    """How a parameter is kept the same for all workers."""

    ALL_REDUCE = "all-reduce"
    """A copy on each worker; gradients are all-reduced."""
    SHARDED = "sharded"
    """Rows are spread over owners, which update them."""
    OBSERVED = "observed"
    """A copy on each worker until the first backward shows whether it is a table."""
    FROZEN = "frozen"
    """A copy on each worker; nothing travels while it needs no gradient."""
    LOCAL = "local"
    """There is one worker only."""


@dataclass(frozen=True)
class ParameterPlan:
    """One line of the plan."""

    name: str
    shape: tuple[int, ...]
    route: Route
    why: str
    row_bytes: int
    """Of a row of a table as it travels."""
    size_bytes: int
    bytes_per_step: float | None = None
    """Sent by a worker in a step on average; None until rows have been counted."""
    predicted_bytes: float | None = None
    """The same by the formulas of `cost`; of a table from the rows that it was seen to touch."""
    early_share: float | None = None
    """Share of a table's rows that come before their batch; 0 without prefetch."""
    row_rule: RowRule | None = None
    """Which rows are updated where it is a table; None for a parameter that cannot be one."""
    is_lazy: bool = False
    """Whether the user chose to update touched rows only, which gives another result."""

    @property
    def exact_row_bytes(self) -> float:
        """Of a row as it is."""
        return self.size_bytes / self.shape[0] if self.shape else self.size_bytes


@dataclass(frozen=True)
class Plan:
    """A route for each parameter. `print(plan)` shows it as a table."""

    num_workers: int
    parameters: tuple[ParameterPlan, ...]
    num_hosts: int | None = None
    """Hosts whose workers ask and push together; None: each worker does for itself."""
    num_partitions: int = 1
    """Parts in which the gradients of rows travel."""
    bucket_bytes: float | None = None
    """Dense gradients that are all-reduced together, where torch's own sizes are not taken."""
    seconds_per_step: float | None = None
    """As measured, over the newest steps."""
    predicted_seconds: float | None = None
    """The same from the links, the compute and the bytes; None where the links are not known."""

    def __getitem__(self, name: str) -> ParameterPlan:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(f"no parameter {name!r} in the plan")

    def routed(self, name: str, route: Route, why: str) -> Plan:
        """A copy in which one parameter has another route."""
        unknown = {"bytes_per_step": None, "predicted_bytes": None, "early_share": None}
        return self._changed({name: {"route": route, "why": why, **unknown}})

    def ruled(self, name: str, rule: RowRule) -> Plan:
        """A copy in which other rows of a table are updated."""
        return self._changed({name: {"row_rule": rule}})

    def observed(self, mean: Record, cluster: Cluster | None) -> Plan:
        """A copy that shows what steps were like, and what they should have been."""
        changes: dict[str, dict[str, object]] = {}
        for line in self.parameters:
            entry = mean.parameters.get(line.name)
            if entry is None or line.route not in (Route.SHARDED, Route.ALL_REDUCE):
                continue
            changes[line.name] = {"bytes_per_step": entry.sent_bytes}
            if line.route is Route.ALL_REDUCE:
                whole = cost.allreduce_bytes(line.size_bytes, self.num_workers)
                changes[line.name]["predicted_bytes"] = whole * (mean.reductions or 1.0)
            else:
                # Owners on the same host cost nothing.
                among = self.num_hosts or self.num_workers
                # Several backwards of a step may push a row that was pulled once.
                rows = (entry.asked_rows + (entry.pushed_rows or entry.asked_rows)) / 2
                predicted = cost.sharded_bytes(rows, line.row_bytes, among)
                changes[line.name]["predicted_bytes"] = predicted
                if entry.asked_rows:
                    changes[line.name]["early_share"] = entry.early_rows / entry.asked_rows
        predicted_seconds = None
        if cluster is not None:
            work = work_of(self.parameters, mean, self.num_workers, self.bucket_bytes)
            merges = self.num_hosts is not None
            predicted_seconds = planned(work, cluster, merges=merges).seconds
        return replace(
            self._changed(changes),
            seconds_per_step=mean.seconds,
            predicted_seconds=predicted_seconds,
        )

    def _changed(self, changes: Mapping[str, Mapping[str, object]]) -> Plan:
        parameters = (
            priced(replace(p, **changes.get(p.name, {})), self.num_workers)  # type: ignore[arg-type]
            for p in self.parameters
        )
        return replace(self, parameters=tuple(parameters))

    def hints(self) -> list[str]:
        """What another choice would save, of which the user should know."""
        tables = [p for p in self.parameters if p.route is Route.SHARDED and _updates_every_row(p)]
        owned_bytes = sum(p.size_bytes for p in tables) / self.num_workers
        if owned_bytes < _NOTICEABLE_BYTES:
            return []
        names = ", ".join(repr(p.name) for p in tables[:3]) + (", …" if len(tables) > 3 else "")
        return [
            f"each worker updates all its rows of {names} in every step ({size(owned_bytes)}), as "
            "one process would. With lazy=True only touched rows would be updated, which is faster "
            "and changes the result"
        ]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        data = json.loads(text)
        parameters = (_line_from(p) for p in data["parameters"])
        return cls(**{**data, "parameters": tuple(parameters)})

    def __str__(self) -> str:
        rows = [("parameter", "shape", "route", "bytes a step", "predicted", "rows ahead", "why")]
        rows += [
            (
                p.name,
                "×".join(map(str, p.shape)),
                p.route.value,
                size(p.bytes_per_step),
                size(p.predicted_bytes),
                "" if p.early_share is None else f"{p.early_share:.0%}",
                p.why + _updates(p),
            )
            for p in self.parameters
        ]
        title = f"Plan for {self.num_workers} workers"
        if self.num_hosts is not None:
            title += "; those of a host ask for rows and push gradients together"
        if self.num_partitions > 1:
            title += f"; gradients of rows travel in {self.num_partitions} parts"
        return "\n".join([title, *in_columns(rows), *self._steps()])

    def _steps(self) -> list[str]:
        if self.seconds_per_step is None:
            return []
        line = f"A step takes {1e3 * self.seconds_per_step:.1f} ms"
        if self.predicted_seconds is not None:
            line += f", predicted were {1e3 * self.predicted_seconds:.1f} ms"
        return [line]


def _line_from(data: dict[str, Any]) -> ParameterPlan:
    rule = data.get("row_rule")
    return ParameterPlan(
        **{
            **data,
            "shape": tuple(data["shape"]),
            "route": Route(data["route"]),
            "row_rule": None if rule is None else RowRule(rule),
        }
    )


def _updates_every_row(line: ParameterPlan) -> bool:
    return line.row_rule is RowRule.EVERY_ROW


def _updates(line: ParameterPlan) -> str:
    """Say which rows a sharded table's owners update."""
    if line.route is not Route.SHARDED or line.row_rule is None:
        return ""
    if _updates_every_row(line):
        return "; every row is updated by its owner"
    return "; only touched rows are updated" + (" (lazy)" if line.is_lazy else "")


def priced(line: ParameterPlan, num_workers: int) -> ParameterPlan:
    if line.route is Route.ALL_REDUCE:
        predicted = line.predicted_bytes
        if predicted is None:  # As if each step had one backward.
            predicted = cost.allreduce_bytes(line.size_bytes, num_workers)
        seen = predicted if line.bytes_per_step is None else line.bytes_per_step
        return replace(line, bytes_per_step=seen, predicted_bytes=predicted)
    if line.route in (Route.FROZEN, Route.LOCAL):
        return replace(line, bytes_per_step=0.0, predicted_bytes=0.0)
    return line
