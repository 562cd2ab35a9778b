"""What routes cost, by hand for small clusters."""

from __future__ import annotations

import pytest

from parallax.planning import cost
from parallax.planning.cost import Cluster, Link, Touched, Traffic

FAST, SLOW = Link(1000.0, 0.001), Link(10.0, 0.1)


def cluster(num_hosts: int, workers_per_host: int) -> Cluster:
    return Cluster(num_hosts, workers_per_host, between=SLOW, within=FAST)


def test_a_workers_bytes() -> None:
    assert cost.allreduce_bytes(100, 4) == 150
    assert cost.sharded_bytes(10, 96, 2) == 2 * 10 * 100 / 2
    assert cost.pull_bytes(3, 5, 10) == 3 * 4 + 50
    assert cost.push_bytes(3, 10, 0) == 3 * 10
    assert cost.push_bytes(3, 10, 3) == 3 * 14
    # The sharded route does not grow with the number of workers.
    assert cost.sharded_bytes(10, 96, 48) < 2 * cost.sharded_bytes(10, 96, 2)


def test_links_between_hosts_make_up_for_a_rest() -> None:
    link = Link(bytes_per_second=100.0, latency_seconds=0.0, burst_bytes=50.0)
    hosts = Cluster(2, 2, between=link, within=link)
    assert hosts.head_start(rest_seconds=2.0) == 0.5
    assert hosts.head_start(rest_seconds=0.2) == 0.2
    assert hosts.head_start(rest_seconds=-1.0) == 0.0
    assert Cluster(1, 2, between=link, within=link).head_start(2.0) == 0.0


def test_one_worker_sends_nothing() -> None:
    alone, touched = cluster(1, 1), Touched(10)
    for traffic in (
        cost.all_reduced(100, alone),
        cost.sharded(touched, 8, alone),
        cost.gathered(touched, 8, alone),
        cost.served(100, alone),
    ):
        assert traffic == Traffic()
        assert traffic.seconds(alone) == 0


def test_one_host_leaves_its_link_alone() -> None:
    assert cost.all_reduced(100, cluster(1, 4)) == Traffic(150, 0, 2, 6)
    assert cost.all_reduced(4e6, cluster(1, 4)) == Traffic(6e6, 0, 6, 6)  # a ring
    assert cost.all_reduced(2e6, cluster(1, 4), reductions=2) == Traffic(3e6, 0, 2, 12)
    assert cost.sharded(Touched(10), 8, cluster(1, 4)) == Traffic(180, 0, 4, 12)
    assert cost.gathered(Touched(10), 8, cluster(1, 4)) == Traffic(480, 0, 3, 3)
    assert cost.served(100, cluster(1, 4)) == Traffic(150, 0, 2, 6)


def test_two_hosts_of_two() -> None:
    touched = Touched(10, growth=0.5)
    assert cost.all_reduced(100, cluster(2, 2)).link_bytes == 150
    # Of a host's 2 · 10 rows the other host owns one half; each is pulled and pushed.
    assert cost.sharded(touched, 8, cluster(2, 2)).link_bytes == 2 * 20 * 12 / 2
    merged = cost.sharded(touched, 8, cluster(2, 2), merges=True).link_bytes
    assert merged == pytest.approx(2 * 10 * 2**0.5 * 12 / 2)
    assert cost.gathered(touched, 8, cluster(2, 2)).link_bytes == 3 * 10 * 16
    assert cost.served(100, cluster(2, 2)).link_bytes == 2 * 2 * 100 / 2
    assert cost.served(100, cluster(2, 2), merges=True).link_bytes == 3 * 100 / 2


def test_seconds_are_those_of_the_slower_way() -> None:
    assert Traffic(worker_bytes=30, link_bytes=50).wire_seconds(cluster(2, 2)) == 5.0
    assert Traffic(worker_bytes=500, link_bytes=1).wire_seconds(cluster(2, 2)) == 0.999
    assert Traffic(30, 50, turns=3).seconds(cluster(2, 2)) == pytest.approx(5.3)
    assert Traffic(30, 0, turns=3).seconds(cluster(1, 2)) == pytest.approx(0.06 + 0.003)


def test_traffic_adds_up_and_turns_go_side_by_side() -> None:
    assert Traffic(1, 2, 3, 4) + Traffic(10, 20, 2, 5) == Traffic(11, 22, 3, 5)
    assert Traffic(1, 2, 3, 4).beside(Traffic(10, 20, 2, 5)) == Traffic(11, 22, 3, 9)
    assert Traffic(10, 20, 3, 4) * 0.5 == Traffic(5, 10, 3, 4)


def test_distinct_rows_grow_as_told() -> None:
    assert Touched(10, growth=0).by(8) == 10
    assert Touched(10, growth=1).by(8) == 80
    assert Touched(10, growth=1 / 3).by(8) == pytest.approx(20)
