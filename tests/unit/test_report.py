"""What a user of `parallax check` reads."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from parallax.launch.check.links import Link
from parallax.launch.check.readiness import HostFacts
from parallax.launch.check.report import report

GIGABIT = 1e9 / 8

FIRST = HostFacts(
    name="node1",
    python="3.11.7",
    torch="2.13.0+cu124",
    parallax="0.1.0",
    hostname="node1.example.com",
    address="10.0.0.1",
    interface="eth0",
    num_cores=32,
    gpus=("NVIDIA A100-SXM4-80GB",) * 4,
    clock_offset_seconds=0.0,
    clock_uncertainty_seconds=0.00021,
)
SECOND = dataclasses.replace(
    FIRST, name="node2", hostname="node2", address="10.0.0.2", clock_offset_seconds=-0.0124
)
THIRD = HostFacts(name="node3", error="ssh timed out; see whether `ssh node3 true` works")


def test_hosts_that_are_ready() -> None:
    link = Link(45e-6, 9.412 * GIGABIT, 0.941 * GIGABIT)
    assert report([FIRST, SECOND], {("node1", "node2"): link}) == (
        """\
host   address   interface  cores  GPUs                python  torch         parallax     clock
node1  10.0.0.1  eth0          32  4 × A100-SXM4-80GB  3.11.7  2.13.0+cu124  0.1.0      ±210 µs
node2  10.0.0.2  eth0          32  4 × A100-SXM4-80GB  3.11.7  2.13.0+cu124  0.1.0     −12.4 ms

from   to     latency        there        back
node1  node2  45.0 µs  9.41 Gbit/s  941 Mbit/s

ready: 2 hosts, slowest link 941 Mbit/s
"""
    )


def test_hosts_that_are_not_ready() -> None:
    fourth = dataclasses.replace(
        FIRST, name="node4", hostname="gpu-17", torch=None, gpus=(), clock_offset_seconds=3.25
    )
    links = {
        ("node2", "node1"): Link(1.2e-3, 12.5 * GIGABIT, 0.0123 * GIGABIT),
        ("node1", "node4"): "no answer from 10.0.0.1 port 40123 within 3 s: a firewall is likely; "
        "allow TCP connections between the hosts",
        ("node2", "node4"): Link(0.9, 9 * GIGABIT, 9 * GIGABIT),
    }
    assert report([FIRST, SECOND, THIRD, fourth], links) == (
        """\
host   hostname  address   interface  cores  GPUs           python  torch         parallax     clock
node1            10.0.0.1  eth0          32  4 × A100-SXM…  3.11.7  2.13.0+cu124  0.1.0      ±210 µs
node2            10.0.0.2  eth0          32  4 × A100-SXM…  3.11.7  2.13.0+cu124  0.1.0     −12.4 ms
node3  ssh timed out; see whether `ssh node3 true` works
node4  gpu-17    10.0.0.1  eth0          32  none           3.11.7  none          0.1.0      +3.25 s

from   to     latency        there         back
node1  node2  1.20 ms  12.3 Mbit/s  12.5 Gbit/s
node1  node4  no connection
node2  node4   900 ms  9.00 Gbit/s  9.00 Gbit/s

problems:
  - node3: ssh timed out; see whether `ssh node3 true` works.
  - node4: no PyTorch there; install torch, or give the python that has it as `python` in the hosts
    file.
  - node1 and node4 have no connection: no answer from 10.0.0.1 port 40123 within 3 s: a firewall is
    likely; allow TCP connections between the hosts.

warnings:
  - node4: no GPU there, though other hosts have some; see what `nvidia-smi` says, or leave the host
    out.
  - node4: its clock is 3.2 s ahead; set it by NTP, or the times in logs do not compare.
  - node1 and node2 have less than 1% of the usual rate between them; see what else uses the network
    there, and what its cards and cables can do.

not ready: 3 problems, 3 warnings
"""
    )


def test_one_host() -> None:
    plain = HostFacts(name="localhost", python="3.11.7", torch="2.13.0", parallax="0.1.0")
    assert report([plain], {}) == (
        "host       python  torch   parallax\nlocalhost  3.11.7  2.13.0  0.1.0\n\nready: 1 host\n"
    )


def test_many_hosts_are_summed_up() -> None:
    names = [f"cluster-worker-{i}.example.com" for i in range(12)]
    hosts = [dataclasses.replace(FIRST, name=name, hostname=name) for name in names]
    links: dict[tuple[str, str], Link | str] = {
        (one, other): Link(5e-5, (8 + i / 100) * GIGABIT, 9 * GIGABIT)
        for i, (one, other) in enumerate(itertools.combinations(names, 2))
    }
    links[names[0], names[1]] = "closed"
    text = report(hosts, links)
    assert max(map(len, text.split("\n"))) <= 100
    assert "cluster-worker-11  10.0.0.1  eth0" in text
    summary = text.split("\n\n")[1].split("\n")
    assert summary[0] == (
        "65 of 66 pairs of hosts are connected, with 8.33 Gbit/s and 50.0 µs in the median; "
        "the slowest:"
    )
    assert len(summary) == 7
    assert summary[2].startswith("cluster-worker-0  cluster-worker-2  50.0 µs  8.01 Gbit/s")
    assert text.endswith("\n\nnot ready: 1 problem\n")
    for pair in links:
        links[pair] = "closed"
    assert "\n0 of 66 pairs of hosts are connected\n" in report(hosts, links)


@pytest.mark.parametrize(
    "names",
    [
        ["node1.example", "node2.example"],  # short enough
        ["a.one-domain.example.com", "a.two-domain.example.com"],
        ["10.0.0.1", "node2.with-a-domain.example.com"],
    ],
)
def test_names_stay_whole_where_they_can_or_must(names: list[str]) -> None:
    rows = report([HostFacts(name=name, error="down") for name in names], {}).split("\n")
    assert [row.split()[0] for row in rows[1:3]] == names


def test_a_name_in_a_sentence_can_be_copied() -> None:
    name = "-".join(["node"] * 18)
    text = report([HostFacts(name="node1", error=f"it does not know the host {name}")], {})
    assert f"\n    {name}.\n" in text


def test_a_long_list_of_problems_is_cut() -> None:
    hosts = [HostFacts(name=f"node{i}", error="down") for i in range(13)]
    text = report(hosts, {})
    assert "  - node9: down.\n  … and 3 more\n\nnot ready: 13 problems\n" in text
