"""What was measured between hosts, kept for the next job on the same ones.

One file for each set of hosts, `parallax/links/<digest>.json` in the user's cache. A cache may be
lost or spoilt at any time: what cannot be read is as if it had not been there.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import pwd
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallax.launch.check.links import Link
from parallax.launch.hosts import Host

_VERSION = 1
_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class Measured:
    """The links of a set of hosts, and when they were measured."""

    date: datetime.datetime
    """In UTC."""
    links: Mapping[tuple[str, str], Link]
    """For pairs of names, as measured: in one of the two orders."""

    def link(self, one: str, other: str) -> Link | None:
        """The link as `one` sees it."""
        if (one, other) in self.links:
            return self.links[one, other]
        found = self.links.get((other, one))
        return None if found is None else found.reversed()


def write(
    hosts: Sequence[Host],
    links: Mapping[tuple[str, str], Link | str],
    environ: Mapping[str, str],
) -> str:
    """Keep the links; the path of the file. Pairs without a connection are left out.

    Raises OSError where the cache cannot be written.
    """
    path = path_of(hosts, environ)
    value = {
        "version": _VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hosts": _identity(hosts),
        "links": [
            {
                "from": one,
                "to": other,
                "latency_seconds": link.latency_seconds,
                "send_bytes_per_second": link.send_bytes_per_second,
                "receive_bytes_per_second": link.receive_bytes_per_second,
            }
            for (one, other), link in links.items()
            if isinstance(link, Link)
        ],
    }
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    _write_whole(path, json.dumps(value, indent=1, allow_nan=False))
    return path


def read(hosts: Sequence[Host], environ: Mapping[str, str]) -> Measured | None:
    """What was kept for these hosts, in whatever order; None where nothing usable is."""
    try:
        with open(path_of(hosts, environ), "rb") as file:
            data = file.read(_MAX_FILE_BYTES)
        return _parsed(json.loads(data), hosts)
    # Whatever may be wrong with the bytes: KeyError and TypeError are another shape of JSON.
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def slowest(hosts: Sequence[Host], environ: Mapping[str, str]) -> float | None:
    """Bytes a second of the slowest link that was kept for these hosts."""
    found = read(hosts, environ)
    if found is None or not found.links:
        return None
    return min(
        min(link.send_bytes_per_second, link.receive_bytes_per_second)
        for link in found.links.values()
    )


def path_of(hosts: Sequence[Host], environ: Mapping[str, str]) -> str:
    """The file for these hosts: one for each set of names and addresses."""
    cache = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # as the specification of XDG wants it
        home = environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
        cache = os.path.join(home, ".cache")
    digest = hashlib.sha256(json.dumps(_identity(hosts)).encode()).hexdigest()[:32]
    return os.path.join(cache, "parallax", "links", f"{digest}.json")


def _identity(hosts: Sequence[Host]) -> list[list[str]]:
    return sorted([host.name, host.address or ""] for host in hosts)


def _parsed(value: Any, hosts: Sequence[Host]) -> Measured | None:
    if value["version"] != _VERSION or value["hosts"] != _identity(hosts):
        return None
    names = {host.name for host in hosts}
    links = {}
    for entry in value["links"]:
        if not names >= {entry["from"], entry["to"]}:
            return None
        links[entry["from"], entry["to"]] = Link(
            _positive(entry["latency_seconds"]),
            _positive(entry["send_bytes_per_second"]),
            _positive(entry["receive_bytes_per_second"]),
        )
    date = datetime.datetime.fromisoformat(value["date"])
    return Measured(date.astimezone(datetime.timezone.utc), links)


def _positive(number: Any) -> float:
    if not 0 < number < math.inf:
        raise ValueError(f"not a positive number: {number!r}")
    return float(number)


def _write_whole(path: str, text: str) -> None:
    """Another reader or writer sees the old file or the new one; nobody else may read either."""
    descriptor, partial = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".partial")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
