"""Workers of one machine in the place of hosts: for machines on which there can be no test bed.

Messages between processes of one machine cost processor time and no wire: what a network would
make of them, the bytes tell.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from benchmarks.testbed import Counters


class Seat(NamedTuple):
    """A worker's place; it has no host of its own."""

    name: str
    address: str = "127.0.0.1"


class Loopback:
    """The part of a test bed that engines need, without any shaping."""

    interface = "lo"

    def __init__(self, num_workers: int) -> None:
        self.hosts = [Seat(f"worker{rank}") for rank in range(num_workers)]

    def __enter__(self) -> Loopback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def popen(self, argv: Sequence[str], host: Seat, **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(list(argv), **options)

    def counters(self, host: Seat) -> Counters:
        """A worker's part of what the interface counted; nothing else should use it meanwhile."""
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == self.interface:
                columns = figures.split()
                share = len(self.hosts)
                return Counters(int(columns[8]) // share, int(columns[0]) // share)
        raise OSError(f"there is no interface {self.interface}")

    def shape(self, host: Seat, rate: str) -> None:
        raise ValueError(f"rate={rate!r}: workers of one machine have no links to shape")
