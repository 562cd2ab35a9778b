"""Measured links, kept in the user's cache."""

from __future__ import annotations

import datetime
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from parallax.launch.check import measured
from parallax.launch.check.links import Link
from parallax.launch.hosts import Host

HOSTS = (Host(name="node1", address="10.0.0.1"), Host(name="node2"), Host(name="node3"))
LINKS: dict[tuple[str, str], Link | str] = {
    ("node1", "node2"): Link(1e-4, 2e8, 3.5e8),
    ("node1", "node3"): "no connection",
    ("node3", "node2"): Link(2e-4, 4e8, 5e8),
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}


def test_what_was_written_is_read(environ: dict[str, str]) -> None:
    before = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    measured.write(HOSTS, LINKS, environ)
    found = measured.read(HOSTS, environ)
    assert found is not None
    assert found.links == {pair: link for pair, link in LINKS.items() if isinstance(link, Link)}
    assert found.date >= before
    assert found.date.utcoffset() == datetime.timedelta(0)
    assert found.link("node2", "node1") == Link(1e-4, 3.5e8, 2e8)
    assert found.link("node3", "node2") == Link(2e-4, 4e8, 5e8)
    assert found.link("node1", "node3") is None


def test_a_file_for_each_set_of_hosts(environ: dict[str, str]) -> None:
    measured.write(HOSTS, LINKS, environ)
    assert measured.read(HOSTS[::-1], environ) is not None
    assert measured.read(HOSTS[:2], environ) is None
    moved = (Host(name="node1", address="10.0.0.9"), *HOSTS[1:])
    assert measured.read(moved, environ) is None
    other_workers = (Host(name="node1", address="10.0.0.1", num_workers=8), *HOSTS[1:])
    assert measured.read(other_workers, environ) is not None


def test_where_the_file_is(tmp_path: Path, environ: dict[str, str]) -> None:
    path = measured.write(HOSTS, LINKS, environ)
    assert Path(path).parent == tmp_path / "cache" / "parallax" / "links"
    for ignored in ("", "relative/path"):
        path = measured.path_of(HOSTS, {**environ, "XDG_CACHE_HOME": ignored})
        assert Path(path).parent == tmp_path / "home" / ".cache" / "parallax" / "links"
    assert os.path.isabs(measured.path_of(HOSTS, {}))


def test_nobody_else_reads_it_and_nothing_else_is_left(environ: dict[str, str]) -> None:
    path = Path(measured.write(HOSTS, LINKS, environ))
    measured.write(HOSTS, LINKS, environ)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_keeps_the_old_file(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(measured.write(HOSTS, LINKS, environ))

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        measured.write(HOSTS, {}, environ)
    assert list(path.parent.iterdir()) == [path]
    found = measured.read(HOSTS, environ)
    assert found is not None
    assert len(found.links) == 2


def test_the_slowest_of_all_is_told(environ: dict[str, str]) -> None:
    assert measured.slowest(HOSTS, environ) is None
    measured.write(HOSTS, {("node1", "node2"): "no connection"}, environ)
    assert measured.slowest(HOSTS, environ) is None
    measured.write(HOSTS, LINKS, environ)
    assert measured.slowest(HOSTS, environ) == 2e8


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"5",
        b"{}",
        b"[" * 100_000,
        b'{"version": 1}',
        b"9" * 5000,
    ],
)
def test_a_damaged_file_counts_as_none(environ: dict[str, str], data: bytes) -> None:
    Path(measured.write(HOSTS, LINKS, environ)).write_bytes(data)
    assert measured.read(HOSTS, environ) is None


def entry(**changes: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(("send_bytes_per_second", "receive_bytes_per_second"), 1.0)
    return {"from": "node1", "to": "node2", "latency_seconds": 1.0, **numbers, **changes}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"hosts": []},
        {"hosts": [["node1", ""], ["node2", ""], ["node3", ""]]},
        {"date": "yesterday"},
        {"date": 5},
        {"links": None},
        {"links": 5},
        {"links": [5]},
        {"links": [{"from": "node1"}]},
        {"links": [entry(to="node9")]},
        {"links": [entry(to=["node2"])]},
        {"links": [entry(latency_seconds=0)]},
        {"links": [entry(latency_seconds="1")]},
        {"links": [entry(send_bytes_per_second=-1.0)]},
        {"links": [entry(send_bytes_per_second=float("nan"))]},
        {"links": [entry(receive_bytes_per_second=float("inf"))]},
        {"links": [entry(receive_bytes_per_second=10**400)]},
        {"links": [entry(receive_bytes_per_second=None)]},
    ],
)
def test_a_foreign_file_counts_as_none(environ: dict[str, str], change: dict[str, Any]) -> None:
    path = Path(measured.write(HOSTS, LINKS, environ))
    path.write_text(json.dumps({**json.loads(path.read_text()), "links": [entry()]}))
    assert measured.read(HOSTS, environ) is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert measured.read(HOSTS, environ) is None


def test_what_is_no_file_counts_as_none(environ: dict[str, str]) -> None:
    assert measured.read(HOSTS, environ) is None
    path = Path(measured.path_of(HOSTS, environ))
    path.mkdir(parents=True)
    assert measured.read(HOSTS, environ) is None
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert measured.read(HOSTS, environ) is None
