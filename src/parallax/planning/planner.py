"""Which route each parameter gets: from what it is, its optimizer and what the user chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from parallax.comm.compression import RowFormat, row_bytes
from parallax.config import Config
from parallax.errors import ConfigError, UnsupportedError
from parallax.planning import cost
from parallax.planning.analysis import Facts, Kind
from parallax.planning.cost import Cluster, Touched
from parallax.planning.plan import ParameterPlan, Plan, Route, RowRule, priced
from parallax.text import size

_WHOLE, _BY_ROWS = 1.1, 0.8
"""A whole gradient goes beside the backward and rows are waited for, so it may be a tenth larger.
Back it goes only for a fifth fewer bytes: no table moves to and fro."""
_TOGETHER = 0.9
"""Where links are not known: what neighbours ask together must be a tenth less than alone."""


@dataclass(frozen=True)
class Updater:
    """What the plan needs to know of a parameter's optimizer."""

    name: str
    rule: RowRule = RowRule.TOUCHED_ROWS
    """The rule that gives the result of one process."""
    refusal: str = ""
    """Why its tables cannot be sharded, as the end of a sentence; empty if they can."""
    may_be_lazy: bool = True
    """Whether it can step on touched rows where that is not exact."""
    refuses_sparse: bool = False
    """Plain torch raises if it gets the gradients of an embedding with `sparse=True`."""
    takes_dense: bool = True


def make_plan(
    facts: list[Facts], updaters: Mapping[str, Updater], config: Config, num_workers: int
) -> Plan:
    """Decide the route of every parameter."""
    _check_patterns_used(facts, config)
    parameters = []
    for fact in facts:
        route, why = decide(fact, updaters[fact.name], config, num_workers)
        is_lazy = wants_lazy(fact, updaters[fact.name], config)
        rule = RowRule.TOUCHED_ROWS if is_lazy else updaters[fact.name].rule
        line = ParameterPlan(
            fact.name,
            tuple(fact.parameter.shape),
            route,
            why,
            row_bytes(fact.parameter, RowFormat(config.wire)),
            fact.size_bytes,
            row_rule=rule if route in (Route.SHARDED, Route.OBSERVED) else None,
            is_lazy=is_lazy,
        )
        parameters.append(priced(line, num_workers))
    megabytes = config.bucket_megabytes
    bucket_bytes = None if megabytes is None else megabytes * (1 << 20)
    return Plan(num_workers, tuple(parameters), bucket_bytes=bucket_bytes)


def decide(fact: Facts, updater: Updater, config: Config, num_workers: int) -> tuple[Route, str]:
    """The route of one parameter, and why."""
    _check_sparse(fact, updater, config)
    route, why = _decide(fact, updater, config, num_workers)
    if route is Route.ALL_REDUCE and not updater.takes_dense:
        raise UnsupportedError(
            f"{fact.name!r} gets a dense gradient ({why}), which {updater.name} does not take: use "
            "Adam for it"
        )
    return route, why


def _decide(fact: Facts, updater: Updater, config: Config, num_workers: int) -> tuple[Route, str]:
    forced = config.route_of(fact.name)
    if forced is not None:
        return _forced(forced, fact, updater, config, num_workers)
    if not fact.parameter.requires_grad:
        return Route.FROZEN, "needs no gradient"
    if fact.kind is Kind.DENSE:
        return _dense(num_workers, "used whole")
    if fact.kind is Kind.TIED:
        return _dense(num_workers, f"used whole: tied, held by {' and '.join(fact.holders)}")
    if fact.has_hooks:
        return _dense(num_workers, "has gradient hooks, which must see the whole gradient")
    return _table_or_dense(fact, updater, config, num_workers)


def _table_or_dense(
    fact: Facts, updater: Updater, config: Config, num_workers: int
) -> tuple[Route, str]:
    if updater.refusal:
        return _dense(num_workers, f"{updater.name} {updater.refusal}")
    if num_workers == 1 and not wants_lazy(fact, updater, config):
        return Route.LOCAL, "one worker"
    if fact.kind is Kind.UNKNOWN:
        return Route.OBSERVED, "the first backward shows whether only rows of it are used"
    return Route.SHARDED, "only rows of it are looked up"


def wants_lazy(fact: Facts, updater: Updater, config: Config) -> bool:
    """Whether the user chose to update touched rows only, where that makes a difference."""
    if updater.rule is RowRule.TOUCHED_ROWS or not updater.may_be_lazy:
        return False
    return config.is_lazy(fact.name)


def _check_sparse(fact: Facts, updater: Updater, config: Config) -> None:
    """Refuse what plain torch refuses in its first step, because it is not clear what is meant."""
    is_table = fact.kind is Kind.EMBEDDING and fact.parameter.requires_grad
    if not (is_table and fact.asks_sparse and updater.refuses_sparse):
        return
    if not wants_lazy(fact, updater, config):
        raise ConfigError(
            f"the embedding of {fact.name!r} has sparse=True, but {updater.name} takes no sparse "
            "gradients, with or without Parallax. Leave sparse=True out: the table is sharded all "
            f"the same, and exact. Or say lazy=[{fact.name!r}] to update touched rows only, or "
            "give it an optimizer for sparse gradients (SparseAdam, SGD, Adagrad)"
        )


def _forced(
    forced: str, fact: Facts, updater: Updater, config: Config, num_workers: int
) -> tuple[Route, str]:
    why = "forced by Config.routes"
    if forced == "all-reduce":
        return _dense(num_workers, why)
    if fact.parameter.dim() == 0 or not fact.parameter.is_floating_point():
        raise ConfigError(
            f"Config.routes asks to shard {fact.name!r}, which has shape "
            f"{tuple(fact.parameter.shape)} and {fact.parameter.dtype}: it has no rows to shard"
        )
    if fact.has_hooks:
        raise UnsupportedError(
            f"Config.routes asks to shard {fact.name!r}, which has gradient hooks: they would not "
            "see its gradient. Remove them, or leave it whole"
        )
    if updater.refusal:
        raise UnsupportedError(
            f"Config.routes asks to shard {fact.name!r}, but {updater.name} {updater.refusal}. "
            "Give its tables an optimizer of their own (say SGD, Adagrad, Adam or SparseAdam)"
        )
    return Route.SHARDED, why


def _dense(num_workers: int, why: str) -> tuple[Route, str]:
    return (Route.LOCAL, "one worker") if num_workers == 1 else (Route.ALL_REDUCE, why)


def better_route(
    line: ParameterPlan, touched: Touched, cluster: Cluster, *, merges: bool
) -> tuple[Route, str] | None:
    """Another route for a table of which a step touches these rows, if it pays."""
    whole = cost.all_reduced(line.size_bytes, cluster).limiting_bytes(cluster)
    traffic = cost.sharded(touched, line.row_bytes, cluster, merges=merges)
    by_rows = traffic.limiting_bytes(cluster)
    whose = "a host's link" if cluster.num_hosts > 1 else "a worker"
    seen = f"a step touches {touched.by_worker:,.0f} of {line.shape[0]:,} rows on a worker"
    if line.route is Route.SHARDED and whole < _WHOLE * by_rows:
        return Route.ALL_REDUCE, f"{seen}: {size(whole)} on {whose} whole, {size(by_rows)} by rows"
    if line.route is Route.ALL_REDUCE and by_rows < _BY_ROWS * whole:
        return Route.SHARDED, f"{seen}: {size(by_rows)} on {whose} by rows, {size(whole)} whole"
    return None


def better_alone(
    wanted_bytes: float, exact_bytes: float, asked_bytes: float, cluster: Cluster | None
) -> str | None:
    """Why the workers of a host should each ask for rows alone; None: better together.

    Of a worker and step: what it wants itself, as it travels between hosts and as it does inside
    one, and what it asks for with its neighbours.
    """
    if not wanted_bytes:
        return None
    seen = f"a worker asks for {size(wanted_bytes)} a step alone, {size(asked_bytes)} together"
    if cluster is None:
        return seen if asked_bytes > _TOGETHER * wanted_bytes else None
    away = (cluster.num_hosts - 1) / cluster.num_hosts
    saved = cluster.workers_per_host * away * (wanted_bytes - asked_bytes)
    spent = (cluster.workers_per_host - 1) * away * exact_bytes  # The rest goes inside anyway.
    saved_seconds = saved / cluster.between.bytes_per_second
    spent_seconds = spent / cluster.within.bytes_per_second
    if spent_seconds <= saved_seconds:
        return None
    return (
        f"{seen}: it saves {1e3 * saved_seconds:.1f} ms on the link and takes "
        f"{1e3 * spent_seconds:.1f} ms inside the host"
    )


def _check_patterns_used(facts: list[Facts], config: Config) -> None:
    """A pattern that no parameter matches is a slip of the pen."""
    lazy = [] if isinstance(config.lazy, bool) else config.lazy
    for field, patterns in (("routes", config.routes), ("lazy", lazy), ("init", config.init)):
        for pattern in patterns:
            if not any(fnmatchcase(fact.name, pattern) for fact in facts):
                names = ", ".join(fact.name for fact in facts[:10])
                raise ConfigError(
                    f"Config.{field} has the pattern {pattern!r}, which no parameter matches; "
                    f"the parameters are {names}{', …' if len(facts) > 10 else ''}"
                )
