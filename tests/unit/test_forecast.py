"""Steps foretold: by hand for small ones, and beside the paper's measurements."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import paper
from parallax.observability.ledger import Entry, Record
from parallax.planning.cost import Cluster, Link, Touched
from parallax.planning.forecast import (
    Architecture,
    Table,
    Work,
    forecast,
    planned,
    scaling,
    work_of,
)
from parallax.planning.plan import ParameterPlan, Route

CLUSTER = Cluster(2, 1, between=Link(1000.0, 0.01), within=Link(1e6, 0.0))
TABLE = Table("table", size_bytes=1e6, row_bytes=96, touched=Touched(10))


def test_dense_gradients_go_beside_the_backward_but_for_the_last_bucket() -> None:
    dense_bytes = 9e6  # buckets of 4 MB, 4 MB and 1 MB
    fast = replace(CLUSTER, between=Link(1e7, 0.01))
    wire = dense_bytes / 1e7  # 2 · S / 2 bytes
    dense = Work((), dense_bytes, compute_seconds=6.0, samples=8, bucket_bytes=4e6)
    found = forecast(dense, fast, Architecture.HYBRID)
    assert found.seconds == pytest.approx(6.0 + 0.1 + 0.02)  # a bucket, and two turns
    assert found.throughput == pytest.approx(2 * 8 / found.seconds)
    # What is left of a short backward when the first bucket is full hides as much.
    short = forecast(replace(dense, compute_seconds=0.3), fast, Architecture.HYBRID)
    window = 0.2 * (1 - 4e6 / dense_bytes)
    assert short.seconds == pytest.approx(0.3 + wire - window + 0.02)
    # … of the backward as it was clocked, if it was.
    clocked = replace(dense, compute_seconds=0.3, backward_seconds=0.1)
    found = forecast(clocked, fast, Architecture.HYBRID)
    assert found.seconds == pytest.approx(0.3 + wire - window / 2 + 0.02)


def test_turns_of_a_ring_take_what_they_were_measured_to_take() -> None:
    four = replace(CLUSTER, num_hosts=4, between=Link(1e7, 0.01))
    work = Work((), dense_bytes=9e6, compute_seconds=6.0, samples=8, bucket_bytes=4e6)
    unmeasured = forecast(work, four, Architecture.HYBRID).seconds
    measured = replace(four, ring_seconds=0.005)
    found = forecast(work, measured, Architecture.HYBRID).seconds
    assert found - unmeasured == pytest.approx(6 * 0.005 - 2 * 0.01)
    # Few gradients go directly, and rows have no ring.
    few = replace(work, dense_bytes=500)
    for each, architecture in ((few, Architecture.HYBRID), (work, Architecture.SHARDED)):
        seconds = [forecast(each, links, architecture).seconds for links in (four, measured)]
        assert seconds[0] == seconds[1]


def test_a_single_bucket_is_waited_for() -> None:
    work = Work((), dense_bytes=500, compute_seconds=0.3, samples=1)
    assert planned(work, CLUSTER).seconds == pytest.approx(0.3 + 0.5 + 0.02)


def test_tables_share_messages_and_dense_gradients_have_their_own() -> None:
    work = Work((TABLE, replace(TABLE, name="other")), 500, compute_seconds=0.3, samples=1)
    four = replace(CLUSTER, num_hosts=4)
    messages = {
        architecture: forecast(work, four, architecture).traffic.messages
        for architecture in Architecture
    }
    assert messages == {
        Architecture.ALL_REDUCE: 6 + 3 + 3,
        Architecture.SHARDED: 6 + 12,
        Architecture.HYBRID: 6 + 12,
    }
    assert planned(work, four).traffic.messages == 6 + 12


def test_links_that_rested_during_compute_have_a_head_start() -> None:
    work = Work((TABLE,), dense_bytes=500, compute_seconds=0.3, samples=1)
    plain = planned(work, CLUSTER).seconds
    burst = replace(CLUSTER, between=replace(CLUSTER.between, burst_bytes=200.0))
    assert planned(work, burst).seconds == pytest.approx(plain - 0.2)
    # Not for longer than they rested, nor below what all bytes take.
    short = replace(work, compute_seconds=0.1)
    assert planned(short, burst).seconds == pytest.approx(planned(short, CLUSTER).seconds - 0.1)
    huge = replace(CLUSTER, between=replace(CLUSTER.between, burst_bytes=1e9))
    for compute, wanted in ((9.0, 9.0), (1.2, 1.5)):
        slow = replace(work, compute_seconds=compute)
        assert planned(slow, huge).seconds == pytest.approx(wanted + 0.04)
    # What limits inside a host has none.
    inside = Cluster(2, 2, between=huge.between, within=Link(1.0, 0.0))
    assert (
        planned(work, inside).seconds
        == planned(work, replace(inside, between=CLUSTER.between)).seconds
    )
    early = Table("table", 1e6, 96, Touched(10), early_share=0.6)  # On the links for 0.3 s.
    busy = replace(work, tables=(early,))
    assert planned(busy, burst).seconds == pytest.approx(planned(busy, CLUSTER).seconds)


@pytest.mark.parametrize(
    ("megabytes", "bucket_bytes", "last"),
    [(26, None, 25), (31, None, 5), (2, None, 1), (0.5, None, 0.5), (8, 4 << 20, 4)],
)
def test_the_last_bucket(megabytes: float, bucket_bytes: int | None, last: float) -> None:
    found = Work((), megabytes * (1 << 20), 0.0, 1.0, bucket_bytes).last_share
    assert found == pytest.approx(last / megabytes)
    assert Work((), 0, 0.0, 1.0).last_share == 0


def test_a_backward_goes_on_beside_the_exchange_when_its_first_bucket_is_full() -> None:
    work = Work((), 4 << 20, 3.0, 1.0)
    assert work.window_seconds == pytest.approx(2.0 * 3 / 4)  # after torch's first one of 1 MB
    assert replace(work, bucket_bytes=2 << 20).window_seconds == pytest.approx(2.0 * 1 / 2)
    assert replace(work, bucket_bytes=8 << 20).window_seconds == 0


def test_rows_are_waited_for_unless_they_come_early() -> None:
    work = Work((TABLE,), dense_bytes=0, compute_seconds=0.3, samples=1)
    # 2 · 10 · 100 / 2 bytes, four turns.
    assert planned(work, CLUSTER).seconds == pytest.approx(0.3 + 1.0 + 0.04)
    early = Table("table", 1e6, 96, Touched(10), early_share=0.5)
    work = Work((early,), dense_bytes=0, compute_seconds=0.3, samples=1)
    assert planned(work, CLUSTER).seconds == pytest.approx(0.3 + 0.75 + 0.04)
    # No step is shorter than what its links carry.
    work = replace(work, compute_seconds=0.1)
    assert planned(work, CLUSTER).seconds == pytest.approx(1.0 + 0.04)


def test_the_hybrid_takes_what_moves_less() -> None:
    tiny = Table("tiny", size_bytes=100, row_bytes=96, touched=Touched(10))
    work = Work((tiny,), dense_bytes=0, compute_seconds=0.0, samples=1)
    assert forecast(work, CLUSTER, Architecture.HYBRID).traffic.link_bytes == 100
    assert planned(work, CLUSTER).traffic.link_bytes == 1000
    sharded = forecast(work, CLUSTER, Architecture.SHARDED)
    assert sharded.traffic.link_bytes == 1000
    gathered = forecast(work, CLUSTER, Architecture.ALL_REDUCE)
    assert gathered.traffic.link_bytes == 10 * (96 + 8)


def line(name: str, route: Route, size_bytes: int) -> ParameterPlan:
    return ParameterPlan(name, (10, 2), route, "", row_bytes=96, size_bytes=size_bytes)


def test_work_is_what_was_seen() -> None:
    mean = Record(
        step=9,
        seconds=1.0,
        header_seconds=0.1,
        local_seconds=0.1,
        samples=32,
        parameters={
            "table": Entry(rows=10, asked_rows=8, early_rows=2, updated_rows=10, seconds=0.2),
            "out": Entry(sent_bytes=5, seconds=0.2),
        },
    )
    lines = [
        line("table", Route.SHARDED, 960),
        line("out", Route.ALL_REDUCE, 50),
        line("unused", Route.SHARDED, 7),
        line("frozen", Route.FROZEN, 8),
    ]
    found = work_of(lines, mean, num_workers=4, bucket_bytes=4e6)
    assert found.bucket_bytes == 4e6
    assert found.dense_bytes == 50
    assert found.compute_seconds == pytest.approx(0.4)
    assert found.samples == 32
    (table,) = found.tables
    assert (table.name, table.early_share) == ("table", 0.25)
    assert table.touched.by(4) == pytest.approx(40)  # each of four owners updated ten
    assert found.backward_seconds is None
    for clocked, taken in ((0.3, 0.3), (0.7, 0.4)):  # It may have waited in it.
        mean.backward_seconds = clocked
        found = work_of(lines, mean, num_workers=4, bucket_bytes=4e6)
        assert found.backward_seconds == pytest.approx(taken)


def test_a_ring_between_hosts_says_nothing_of_one_inside() -> None:
    work = Work((), dense_bytes=9e6, compute_seconds=1.0, samples=1)
    measured = Cluster(2, 4, Link(1e9, 1e-3), Link(1e9, 1e-5), ring_seconds=0.1)
    columns = scaling(work, measured, [1, 2, 4])[Architecture.HYBRID]
    bare = scaling(work, replace(measured, ring_seconds=None), [1, 2, 4])[Architecture.HYBRID]
    longer = [step.seconds - other.seconds for step, other in zip(columns, bare, strict=True)]
    assert longer[0] == 0
    assert longer[1:] == pytest.approx([14 * (0.1 - 1e-3), 30 * (0.1 - 1e-3)])


# The paper --------------------------------------------------------------------------------


def test_the_page_has_what_is_forecast_now() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "planner.md"
    assert paper.page().strip() in page.read_text()


@pytest.mark.parametrize("place", range(1, len(paper.NUM_MACHINES)))
def test_the_papers_order_for_lm(place: int) -> None:
    found = {kind: steps[place].throughput for kind, steps in paper.forecasts(paper.LM).items()}
    order = sorted(found, key=found.__getitem__)
    assert order == [Architecture.ALL_REDUCE, Architecture.SHARDED, Architecture.HYBRID]


def test_the_papers_order_for_nmt_and_resnet() -> None:
    nmt = {kind: steps[-1].throughput for kind, steps in paper.forecasts(paper.NMT).items()}
    order = sorted(nmt, key=nmt.__getitem__)
    assert order == [Architecture.ALL_REDUCE, Architecture.SHARDED, Architecture.HYBRID]
    resnet = {kind: steps[-1].throughput for kind, steps in paper.forecasts(paper.RESNET).items()}
    assert resnet[Architecture.HYBRID] == resnet[Architecture.ALL_REDUCE]
    assert resnet[Architecture.SHARDED] < 0.7 * resnet[Architecture.HYBRID]  # 1 / 1.53 there


def test_the_shape_of_the_papers_curve() -> None:
    """Each machine adds less than the one before; gathering rows gains little after the second."""
    found = paper.forecasts(paper.LM)
    (measured,) = [f for f in paper.LM_FIGURES if f.architecture is Architecture.HYBRID]
    hybrid = [step.throughput / 1e3 for step in found[Architecture.HYBRID]]
    for words in (hybrid, list(measured.words.values())):
        assert all(after > before for before, after in pairwise(words))
        efficiency = [w / n for w, n in zip(words, paper.NUM_MACHINES, strict=True)]
        assert all(after < before for before, after in pairwise(efficiency))
    for words, told in zip(hybrid, measured.words.values(), strict=True):
        assert 1 / 1.35 < words / told < 1.35
    gathered = [step.throughput for step in found[Architecture.ALL_REDUCE]]
    assert gathered[-1] < 1.2 * gathered[1]
