"""What counts as a change of a worker's speed or of the links, and what is noise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallax.observability.ledger import Entry, Record
from parallax.planning import links, replan
from parallax.planning.changes import Notice, TunePartitions
from parallax.planning.cost import Cluster, Link
from parallax.planning.drift import Drift, Pace, of_links
from parallax.planning.plan import Plan


def paces(compute: list[float], waiting: list[float]) -> list[Pace]:
    return [Pace(c, w, 1e6) for c, w in zip(compute, waiting, strict=True)]


def test_a_pace_is_that_of_the_median_step() -> None:
    records = [
        Record(step, seconds, header_seconds=0.1, parameters={"a": Entry(5, seconds=0.2)})
        for step, seconds in enumerate((1.0, 1.1, 90.0))
    ]
    assert Pace.of(records) == Pace(pytest.approx(0.8), pytest.approx(0.3), 5)


def test_a_worker_that_becomes_slower_is_told_once() -> None:
    drift = Drift()
    assert drift.of_workers(paces([0.1, 0.1, 0.2], [0, 0, 0])) == []
    assert drift.of_workers(paces([0.12, 0.08, 0.25], [0, 0, 0])) == []
    slower = drift.of_workers(paces([0.1, 0.19, 0.2], [0, 0, 0]))
    assert slower == ["worker 1 computes 190.0 ms a step, 100.0 ms before"]
    assert drift.of_workers(paces([0.1, 0.19, 0.2], [0, 0, 0])) == []
    assert drift.of_workers(paces([0.1, 0.1, 0.2], [0, 0, 0])) == [
        "worker 1 computes 100.0 ms a step, 190.0 ms before"
    ]


def test_links_are_suspected_when_even_the_last_worker_waits_otherwise() -> None:
    drift = Drift()
    assert not drift.of_waits(paces([0.1, 0.1], [0.1, 0.12]))
    assert not drift.of_waits(paces([0.1, 0.5], [0.5, 0.1]))  # One waits for the other only.
    assert drift.of_waits(paces([0.1, 0.1], [0.3, 0.25]))
    assert not drift.of_waits(paces([0.1, 0.1], [0.3, 0.25]))
    assert drift.of_waits(paces([0.1, 0.1], [0.1, 0.12]))
    # What is nearly nothing of a step is not worth a measurement.
    assert not drift.of_waits(paces([9.0, 9.0], [0.01, 0.01]))
    assert not Drift().of_waits([Pace(0.1, 0.0, 0.0)])


def test_fast_links_are_suspected_as_well() -> None:
    drift = Drift()
    assert not drift.of_waits([Pace(0.1, 0.1, 1e9)])
    assert drift.of_waits([Pace(0.1, 0.2, 1e9)])
    assert not drift.of_waits([Pace(0.1, 0.4, 2e9)])  # Twice as long for twice as much.


def test_links_that_carry_otherwise_are_named() -> None:
    def cluster(between: float, within: float) -> Cluster:
        return Cluster(2, 2, Link(between, 1e-4), Link(within, 1e-5))

    assert of_links(cluster(25e6, 1e9), cluster(24e6, 1.1e9)) is None
    assert of_links(cluster(25e6, 1e9), cluster(12e6, 1.1e9)) == (
        "links between hosts carry 96 Mbit/s, 200 Mbit/s before"
    )
    assert of_links(cluster(25e6, 1e9), cluster(25e6, 2e9)) == (
        "links inside hosts carry 16.0 Gbit/s, 8.0 Gbit/s before"
    )


def two_workers(peers: Any) -> replan.Replanner:
    """Of two workers on two hosts; no table may move."""
    hosts: Any = type("Two", (), {"workers": [[0], [1]], "__len__": lambda self: 2})()
    return replan.Replanner(peers, hosts, torch.device("cpu"), (), may_separate=False)


def test_links_are_measured_seldom_and_no_change_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replan, "_FIRST_STEPS", 1)
    monkeypatch.setattr(replan, "_MAX_STEPS", 2)
    steps: list[Record] = []
    ledger = SimpleNamespace(records=steps, totals={})
    peers: Any = SimpleNamespace(
        num_workers=2, step=0, ledger=ledger, gather=lambda mine, _: [mine] * 2
    )
    measured: list[float] = []
    known = Cluster(2, 1, Link(1e8, 1e-4), Link(1e9, 1e-5))

    def measure(*_: object) -> Cluster:
        measured.append(steps[-1].seconds)
        return known

    monkeypatch.setattr(links, "measure", measure)
    replanner = two_workers(peers)

    def train(num_steps: int, waiting: float) -> None:
        for _ in range(num_steps):
            entry = Entry(1e6, seconds=waiting)
            steps.append(Record(0, 1.0 + waiting, parameters={"a": entry}))
            found = replanner.after_step(Plan(2, ()), known, {}, len(steps), is_tuning=False)
            assert found == []

    train(9, 1.0)
    assert measured == []
    train(10, 3.0)
    assert measured == [4.0]
    train(10, 1.0)  # Too soon.
    assert measured == [4.0]
    train(100, 1.0)
    assert measured == [4.0, 2.0]


def test_a_worker_s_new_speed_is_told_always_and_followed_now_and_then() -> None:
    steps: list[Record] = []
    ledger = SimpleNamespace(records=steps, totals={})
    peers: Any = SimpleNamespace(
        num_workers=2, step=0, ledger=ledger, gather=lambda mine, _: [mine] * 2
    )
    told: list[str] = []
    followed: list[float] = []
    replanner = two_workers(peers)

    def train(num_steps: int, seconds: float) -> None:
        for _ in range(num_steps):
            steps.append(Record(0, seconds))
            for change in replanner.after_step(Plan(2, ()), None, {}, len(steps), is_tuning=False):
                if isinstance(change, Notice):
                    told.append(change.text)
                else:
                    assert change == TunePartitions()
                    followed.append(seconds)

    train(25, 1.0)
    train(80, 1.0)
    assert (told, followed) == ([], [])
    train(100, 2.0)
    assert (len(told), followed) == (2, [2.0])  # Both workers are as fast as each other.
    train(100, 1.0)
    assert (len(told), followed) == (4, [2.0])  # Too soon, and not forgotten.
    train(1800, 1.0)
    assert (len(told), followed) == (4, [2.0])
    train(100, 1.0)
    assert (len(told), followed) == (4, [2.0, 1.0])
    train(3000, 1.0)
    assert (len(told), followed) == (4, [2.0, 1.0])
