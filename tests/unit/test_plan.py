"""Routes and reasons, for models that no worker has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from parallax.config import Config
from parallax.engine.row_optimizer import updater_of
from parallax.errors import ConfigError, UnsupportedError
from parallax.observability.ledger import Entry, Record
from parallax.planning import cost
from parallax.planning.analysis import Kind, analyse
from parallax.planning.cost import Cluster, Link, Touched
from parallax.planning.plan import ParameterPlan, Plan, Route, RowRule
from parallax.planning.planner import better_alone, better_route, make_plan
from tests.support.models import EXACT, OPTIMIZERS, Lookup, make_batches


def plan_of(
    model: nn.Module, optimizer: str = "sgd", num_workers: int = 4, **options: object
) -> Plan:
    chosen = OPTIMIZERS[optimizer](model.parameters())
    facts = analyse(model)
    updaters = {fact.name: updater_of(chosen, chosen.param_groups[0]) for fact in facts}
    return make_plan(facts, updaters, Config().replace(**options), num_workers)


def test_kinds() -> None:
    model = nn.ModuleDict(
        {
            "emb": nn.Embedding(5, 2),
            "bag": nn.EmbeddingBag(5, 2),
            "small": nn.Linear(2, 2),
            "large": nn.Linear(2, 2000),
            "conv": nn.Conv1d(2, 2, 1),
        }
    )
    model.scalar = nn.Parameter(torch.zeros(()))
    model.bare = nn.Parameter(torch.zeros(5, 2))
    kinds = {fact.name: fact.kind for fact in analyse(model)}
    assert kinds["emb.weight"] is kinds["bag.weight"] is Kind.EMBEDDING
    assert kinds["small.weight"] is kinds["conv.weight"] is kinds["scalar"] is Kind.DENSE
    assert kinds["large.weight"] is kinds["bare"] is kinds["large.bias"] is Kind.UNKNOWN


def test_tied_modules_name_each_other() -> None:
    line = plan_of(Lookup("tied"))["table.weight"]
    assert line.route is Route.ALL_REDUCE
    assert line.why == "used whole: tied, held by table (Embedding) and back (Linear)"


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "rprop"])
def test_routes_by_optimizer(optimizer: str) -> None:
    model = Lookup("embedding")
    default = plan_of(model, optimizer)["table.weight"]
    lazy = plan_of(model, optimizer, lazy=True)["table.weight"]
    assert default.route is lazy.route is Route.SHARDED
    is_exact_on_touched_rows = optimizer in EXACT
    assert (default.row_rule is RowRule.TOUCHED_ROWS) == is_exact_on_touched_rows
    assert lazy.row_rule is RowRule.TOUCHED_ROWS
    assert lazy.is_lazy != is_exact_on_touched_rows


def test_what_cannot_be_lazy_is_exact() -> None:
    line = plan_of(Lookup("embedding"), "rprop", lazy=True)["table.weight"]
    assert line.row_rule is RowRule.EVERY_ROW
    assert not line.is_lazy


@pytest.mark.parametrize("optimizer", ["adam", "sgd-decay", "adagrad-decay"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_sparse_embeddings_are_refused_where_torch_refuses_them(
    optimizer: str, num_workers: int
) -> None:
    """Whether dense or lazy updates are meant is the user's to say."""
    model = Lookup("sparse")
    with pytest.raises(RuntimeError, match="sparse"):
        model(make_batches(1)[0]).backward()
        OPTIMIZERS[optimizer](model.parameters()).step()
    with pytest.raises(
        ConfigError, match=r"'table.weight' has sparse=True.*lazy=\['table.weight'\]"
    ):
        plan_of(Lookup("sparse"), optimizer, num_workers)
    lazy = plan_of(Lookup("sparse"), optimizer, num_workers, lazy=["table.*"])["table.weight"]
    assert lazy.route is Route.SHARDED
    assert lazy.is_lazy


def test_sparse_momentum_changes_every_row_as_in_torch() -> None:
    line = plan_of(Lookup("sparse"), "sgd-momentum")["table.weight"]
    assert line.row_rule is RowRule.EVERY_ROW


def test_one_worker_needs_no_route_but_for_laziness() -> None:
    assert plan_of(Lookup("embedding"), num_workers=1)["table.weight"].route is Route.LOCAL
    lazy = plan_of(Lookup("embedding"), "adam", num_workers=1, lazy=True)
    assert lazy["table.weight"].route is Route.SHARDED


def test_forced_routes_are_checked() -> None:
    model = Lookup("embedding")
    assert plan_of(model, routes={"*": "all-reduce"})["table.weight"].route is Route.ALL_REDUCE
    model.scalar = nn.Parameter(torch.zeros(()))
    with pytest.raises(ConfigError, match="it has no rows to shard"):
        plan_of(model, routes={"scalar": "sharded"})
    with pytest.raises(KeyError, match="no parameter 'nothing'"):
        plan_of(model)["nothing"]


@pytest.mark.parametrize("field", ["routes", "lazy", "init"])
def test_patterns_that_match_nothing_are_named(field: str) -> None:
    given = {"routes": {"tabel.*": "sharded"}, "lazy": ["tabel.*"], "init": {"tabel.*": print}}
    with pytest.raises(ConfigError, match=f"Config.{field} has the pattern 'tabel"):
        plan_of(Lookup("embedding"), **{field: given[field]})


def test_bytes_follow_the_formulas() -> None:
    plan = plan_of(Lookup("embedding"), routes={"table.*": "all-reduce"})
    assert plan["table.weight"].bytes_per_step == cost.allreduce_bytes(40 * 6 * 4, 4)
    entries = {"table.weight": Entry(123.0, rows=5, asked_rows=3), "out.weight": Entry(9.0)}
    mean = Record(0, seconds=0.5, parameters=entries)
    seen = plan_of(Lookup("embedding")).observed(mean, None)
    assert seen["table.weight"].bytes_per_step == 123.0
    assert seen["table.weight"].predicted_bytes == cost.sharded_bytes(3, 6 * 4, 4)
    more = replace(mean, parameters={"table.weight": Entry(9.0, asked_rows=3, pushed_rows=9)})
    several = plan_of(Lookup("embedding")).observed(more, None)["table.weight"]
    assert several.predicted_bytes == cost.sharded_bytes(6, 6 * 4, 4)  # Pushed by each backward.
    assert seen["out.weight"].bytes_per_step == 9.0
    assert seen["out.weight"].predicted_bytes == cost.allreduce_bytes(6 * 4, 4)
    twice = plan_of(Lookup("embedding")).observed(replace(mean, reductions=2.0), None)
    assert twice["out.weight"].predicted_bytes == 2 * cost.allreduce_bytes(6 * 4, 4)
    assert "A step takes 500.0 ms" in str(seen)
    by_host = replace(plan_of(Lookup("embedding")), num_hosts=2).observed(mean, None)
    assert by_host["table.weight"].predicted_bytes == cost.sharded_bytes(3, 6 * 4, 2)
    assert "ask for rows and push gradients together" in str(by_host)
    assert Plan.from_json(seen.to_json()) == seen
    again = seen.routed("table.weight", Route.ALL_REDUCE, "used whole")["table.weight"]
    assert again.bytes_per_step == again.predicted_bytes == cost.allreduce_bytes(40 * 6 * 4, 4)


def test_nearly_dense_and_tiny_tables_are_better_whole() -> None:
    def better(line: ParameterPlan, rows: float) -> tuple[Route, str] | None:
        return better_route(line, Touched(rows), Cluster.unmeasured(1, 4), merges=False)

    line = plan_of(Lookup("embedding"))["table.weight"]  # 40 rows of 24 bytes
    assert better(line, 36) is not None
    route, why = better(line, 39) or (None, "")
    assert route is Route.ALL_REDUCE
    assert "a step touches 39 of 40 rows" in why
    assert better(line, 28) is None
    whole = plan_of(Lookup("embedding"), routes={"*": "all-reduce"})["table.weight"]
    assert better(whole, 39) is None
    assert better(whole, 30) is None  # not back at once
    assert (better(whole, 20) or (None,))[0] is Route.SHARDED


def test_what_a_hosts_link_carries_decides_between_routes() -> None:
    """Each of four workers sends its own rows over it, a whole gradient once and its sum once."""
    line = plan_of(Lookup("embedding"))["table.weight"]
    touched, hosts = Touched(15, growth=0.1), Cluster.unmeasured(2, 4)
    assert better_route(line, touched, Cluster.unmeasured(8, 1), merges=False) is None
    route, why = better_route(line, touched, hosts, merges=False) or (None, "")
    assert route is Route.ALL_REDUCE
    assert "1.7 kB on a host's link whole" in why
    assert better_route(line, touched, hosts, merges=True) is None


def test_hints_say_what_updating_every_row_takes() -> None:
    """Once for all tables, and only where it takes a time that a user would notice."""
    model = nn.ModuleDict({name: nn.Embedding(50_000, 256, device="meta") for name in "ab"})
    model["out"] = nn.Linear(2, 2, device="meta")
    (hint,) = plan_of(model, "adam", num_workers=2).hints()
    assert "all its rows of 'a.weight', 'b.weight' in every step (51.2 MB)" in hint
    assert "lazy=True" in hint
    assert not plan_of(model, "adam", num_workers=8).hints()
    assert not plan_of(model, "adam", num_workers=2, lazy=True).hints()
    assert not plan_of(model, "adam", num_workers=2, routes={"*": "all-reduce"}).hints()
    assert not plan_of(model, "sgd", num_workers=2).hints()


def test_the_plan_says_which_rows_are_updated() -> None:
    def row(optimizer: str, **options: object) -> str:
        return str(plan_of(Lookup("embedding"), optimizer, **options)).splitlines()[-1]

    assert row("adam").endswith("; every row is updated by its owner")
    assert row("sgd").endswith("; only touched rows are updated")
    assert row("adam", lazy=True).endswith("; only touched rows are updated (lazy)")
    assert "updated" not in row("adam", routes={"*": "all-reduce"})
    plan = plan_of(Lookup("embedding"), "adam")
    assert Plan.from_json(plan.to_json()) == plan


def test_gradient_hooks_keep_a_table_whole() -> None:
    model = Lookup("embedding")
    model.table.weight.register_hook(lambda gradient: gradient)
    assert "hooks" in plan_of(model)["table.weight"].why
    with pytest.raises(UnsupportedError, match="has gradient hooks"):
        plan_of(model, routes={"table.*": "sharded"})


def test_an_embedding_with_other_parameters() -> None:
    class Scaled(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(5, 2)
            self.scale = nn.Parameter(torch.ones(()))

    plan = plan_of(Scaled())
    assert plan["weight"].route is Route.SHARDED
    assert plan["scale"].route is Route.ALL_REDUCE


def test_the_table_prints() -> None:
    text = str(plan_of(Lookup("embedding")))
    assert text.splitlines()[0] == "Plan for 4 workers"
    assert "40×6" in text
    assert "not yet" in text


def test_workers_of_a_host_ask_together_where_it_pays() -> None:
    assert better_alone(0, 0, 0, None) is None
    assert better_alone(100, 100, 80, None) is None
    assert "100 B a step alone, 95 B together" in (better_alone(100, 100, 95, None) or "")
    slow, fast = Link(1e6, 0.0), Link(1e9, 0.0)
    assert better_alone(1e6, 1e6, 0.8e6, Cluster(2, 2, slow, fast)) is None
    assert better_alone(1e6, 0.3e6, 0.8e6, Cluster(2, 2, slow, slow)) is None
    why = better_alone(1e6, 1e6, 0.8e6, Cluster(2, 2, slow, slow)) or ""
    assert "saves 200.0 ms on the link and takes 500.0 ms inside the host" in why
