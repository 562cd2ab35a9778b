"""What the facts of a check mean."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from parallax.launch.check.links import Link
from parallax.launch.check.readiness import HostFacts, judge, pairs_of

FAST, SLOW = Link(1e-4, 1e9, 1e9), Link(1e-4, 1e9, 4.9e8)


def host(name: str, **changes: Any) -> HostFacts:
    facts = HostFacts(
        name=name,
        python="3.11.7",
        torch="2.13.0+cpu",
        parallax="0.1.0",
        clock_offset_seconds=0.0,
    )
    return dataclasses.replace(facts, **changes)


def all_pairs(names: str, link: Link | str = FAST) -> dict[tuple[str, str], Link | str]:
    return dict.fromkeys(itertools.combinations(names, 2), link)


def test_hosts_that_agree_are_ready() -> None:
    found = judge([host(name) for name in "abc"], all_pairs("abc"))
    assert found.is_ready
    assert found.problems == found.warnings == ()
    assert judge([host("a")], {}).is_ready


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"error": "ssh said no; try again"}, "c: ssh said no; try again."),
        ({"parallax": None}, "c: no Parallax there; install parallax-torch, or give the python"),
        ({"torch": None}, "c: no PyTorch there; install torch, or give the python"),
        ({"parallax": "0.2.0"}, "Parallax is 0.1.0 on a, b, but 0.2.0 on c; install the same"),
        ({"torch": "2.12.1+cpu"}, "torch is 2.13.0 on a, b, but 2.12.1 on c; install the same"),
    ],
)
def test_a_problem(changes: dict[str, Any], says: str) -> None:
    found = judge([host("a"), host("b"), host("c", **changes)], all_pairs("abc"))
    assert not found.is_ready
    assert len(found.problems) == 1
    assert found.problems[0].startswith(says)
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"torch": "2.13.0+cu124"}, "torch is 2.13.0+cpu on a, b, but 2.13.0+cu124 on c; install"),
        ({"torch": "2.13.0"}, "torch is 2.13.0+cpu on a, b, but 2.13.0 on c; install the same"),
        ({"python": "3.12.0"}, "Python is 3.11 on a, b, but 3.12 on c; install the same version"),
        ({"gpus": ("A100",)}, "a, b: no GPU there, though other hosts have some; see what"),
        ({"clock_offset_seconds": 1.5}, "c: its clock is 1.5 s ahead; set it by NTP"),
        ({"clock_offset_seconds": -90.0}, "c: its clock is 90.0 s behind; set it by NTP"),
    ],
)
def test_a_warning(changes: dict[str, Any], says: str) -> None:
    found = judge([host("a"), host("b"), host("c", **changes)], all_pairs("abc"))
    assert found.is_ready
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith(says)


@pytest.mark.parametrize(
    "changes",
    [
        {"python": "3.11.9"},
        {"clock_offset_seconds": -0.9},
        {"clock_offset_seconds": 1.5, "clock_uncertainty_seconds": 0.6},
        {"clock_offset_seconds": None},
        {"hostname": "other", "num_cores": 1, "interface": "eth9"},
    ],
)
def test_what_is_worth_no_word(changes: dict[str, Any]) -> None:
    found = judge([host("a"), host("b"), host("c", **changes)], all_pairs("abc"))
    assert found.problems == found.warnings == ()


def test_links_are_found_in_either_order() -> None:
    hosts = [host("a"), host("b"), host("c", error="down")]
    assert pairs_of(hosts, {("b", "a"): Link(1.0, 2.0, 3.0)}) == {("a", "b"): Link(1.0, 3.0, 2.0)}
    assert pairs_of(hosts, {("b", "a"): "why"}) == {("a", "b"): "why"}


def test_pairs_without_a_connection() -> None:
    hosts = [host(name) for name in "abcd"]
    links = {**all_pairs("abcd"), ("b", "d"): "firewall; open it"}
    assert judge(hosts, links).problems == ("b and d have no connection: firewall; open it.",)
    del links["b", "d"]
    assert judge(hosts, links).problems == (
        "b and d have no connection: it was not measured; start the check again.",
    )


def test_one_sentence_for_a_host_without_any_connection() -> None:
    hosts = [host(name) for name in "abcd"]
    links = {**all_pairs("abcd"), ("a", "b"): "why"}
    links |= {("a", "d"): "closed", ("b", "d"): "closed", ("c", "d"): "closed"}
    assert judge(hosts, links).problems == (
        "d has a connection to no other host: closed.",
        "a and b have no connection: why.",
    )
    assert judge(hosts, all_pairs("abcd", "closed")).problems == (
        "No two hosts have a connection: closed.",
    )
    assert judge(hosts[:2], all_pairs("ab", "closed")).problems == (
        "a and b have no connection: closed.",
    )


def test_links_that_are_much_slower_than_the_usual_one() -> None:
    hosts = [host(name) for name in "abcd"]
    links = {**all_pairs("abcd"), ("a", "c"): SLOW, ("b", "c"): Link(1e-4, 1e8, 1e9)}
    found = judge(hosts, links)
    assert found.is_ready
    assert [warning.split(";")[0] for warning in found.warnings] == [
        "b and c have 10% of the usual rate between them",
        "a and c have 49% of the usual rate between them",
    ]
    assert judge(hosts, {**all_pairs("abcd"), ("a", "c"): Link(1e-4, 5.1e8, 1e9)}).warnings == ()


def test_one_sentence_for_a_host_of_which_every_link_is_slow() -> None:
    links = {**all_pairs("abcde"), **{(name, "e"): SLOW for name in "abcd"}}
    found = judge([host(name) for name in "abcde"], links)
    assert [warning.split(";")[0] for warning in found.warnings] == [
        "e has at most 49% of the usual rate to every other host"
    ]


def test_long_lists_are_shortened() -> None:
    found = judge([host(str(i), torch=None) for i in range(8)], all_pairs("01234567"))
    assert found.problems[0].startswith("0, 1, 2, 3, 4 and 3 more: no PyTorch there")
