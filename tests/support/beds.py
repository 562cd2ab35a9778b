"""Workers on the hosts of a test bed, started as torchrun would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import parallax
from benchmarks.testbed import Testbed

SOURCE = Path(parallax.__file__).resolve().parents[1]
_PORT = 29400


def run_on_bed(
    bed: Testbed, script: Path, *args: str, per_host: int, log: Path
) -> list[subprocess.Popen[str]]:
    """Start a script on all hosts, so many times on each; what it prints goes to the log."""
    num_workers = per_host * len(bed.hosts)
    shared = {
        "WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": bed.hosts[0].address,
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": bed.interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SOURCE),
    }
    with log.open("a") as out:
        return [
            bed.popen(
                [sys.executable, str(script), *args],
                bed.hosts[rank // per_host],
                env={
                    **os.environ,
                    **shared,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % per_host),
                },
                stdout=out,
                stderr=out,
                text=True,
            )
            for rank in range(num_workers)
        ]
