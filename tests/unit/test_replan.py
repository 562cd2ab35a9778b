"""Decisions of the re-planner are plain data: which ones follow from what steps have touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from parallax.observability.ledger import Entry
from parallax.planning import replan, touched_rows
from parallax.planning.changes import Change, MergeHosts, MoveTable, Notice
from parallax.planning.cost import Cluster, Link
from parallax.planning.host_merging import HostMerging
from parallax.planning.plan import ParameterPlan, Plan, Route

ROWS, WIDTH = 1000, 16
SLOW = Cluster(2, 2, Link(1e7, 1e-4), Link(1e10, 1e-5))
FAST = Cluster(2, 2, Link(1e10, 1e-4), Link(1e10, 1e-5))


class Training:
    """Two workers on one host that do the same, with one sharded table."""

    def __init__(self, movable: tuple[str, ...] = ("table",)) -> None:
        self.totals: dict[str, Entry] = {"table": Entry()}
        peers: Any = SimpleNamespace(
            num_workers=2,
            step=0,
            ledger=SimpleNamespace(totals=self.totals, records=[]),
            gather=lambda mine, _: [mine] * 2,
        )
        hosts: Any = type("One", (), {"workers": [[0, 1]], "__len__": lambda self: 1})()
        cpu = torch.device("cpu")
        self.replanner = replan.Replanner(peers, hosts, cpu, movable, may_separate=True)
        line = ParameterPlan(
            "table", (ROWS, WIDTH), Route.SHARDED, "test", 4 * WIDTH, 4 * WIDTH * ROWS
        )
        self.plan = Plan(2, (line,))
        parameter = nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.table: Any = SimpleNamespace(name="table", parameter=parameter, shard=parameter)
        self.num_steps = 0

    def run(self, num_steps: int, touched: int) -> list[Change]:
        """What is decided while each worker touches so many rows in each step."""
        found: list[Change] = []
        for _ in range(num_steps):
            self.num_steps += 1
            before = self.totals["table"]
            self.totals["table"] = Entry(
                rows=before.rows + touched, updated_rows=before.updated_rows + touched / 2
            )
            found += self.replanner.after_step(
                self.plan, None, {"table": self.table}, self.num_steps, is_tuning=True
            )
        return found


def test_a_table_that_is_nearly_dense_becomes_dense_and_back() -> None:
    training = Training()
    assert training.run(4, ROWS) == []
    (change,) = training.run(1, ROWS)
    assert isinstance(change, MoveTable)
    assert (change.name, change.route) == ("table", Route.ALL_REDUCE)
    # Deciding alone changes nothing: the caller moves the table.
    assert training.plan["table"].route is Route.SHARDED
    training.plan = training.plan.routed("table", change.route, change.why)
    training.table.shard = None
    training.table.parameter.grad = torch.zeros(ROWS, WIDTH)
    training.table.parameter.grad[:10] = 1
    (back,) = training.run(20, 10)
    assert isinstance(back, MoveTable)
    assert back.route is Route.SHARDED


def test_a_table_of_which_few_rows_are_touched_stays() -> None:
    assert Training().run(25, 10) == []


def test_a_table_that_is_held_stays() -> None:
    training = Training()
    training.replanner.hold("table")
    assert training.run(25, ROWS) == []
    assert Training(movable=()).run(25, ROWS) == []


def test_too_little_memory_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_rows, "free_bytes", lambda device, workers: 0.0)
    training = Training()
    (change,) = training.run(25, ROWS)
    assert isinstance(change, Notice)
    assert "'table' stays sharded, for want of memory" in change.text
    assert training.run(100, ROWS) == []


def test_host_merging_is_switched_off_and_on_as_links_want_it() -> None:
    peers: Any = SimpleNamespace(step=0, gather=lambda mine, _: [mine])
    merging = HostMerging(peers)
    assert merging.switch_on(SLOW, "slow") == []  # Nothing is known of what workers share.
    step_bytes = torch.tensor([1e6, 1e6, 6e5], dtype=torch.float64)
    assert merging.switch_off(step_bytes, SLOW) == []
    (change,) = merging.switch_off(step_bytes, FAST)
    assert isinstance(change, MergeHosts)
    assert not change.is_on
    assert merging.switch_on(FAST, "fast") == []
    assert merging.switch_on(SLOW, "slow") == [MergeHosts(True, "slow")]
