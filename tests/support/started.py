"""A script that any launcher can start: trains, and writes down what it found.

    python -m tests.support.started DIRECTORY [HOSTNAME]

Rank 0 writes the parameters, each worker a note of its own place.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import parallax
from tests.support.parity import Case, build, take_steps, train_alone

CASE = Case("embedding", num_steps=6)


def train(directory: Path, **options: Any) -> None:
    torch.set_num_threads(1)
    model, optimizers = build(CASE)
    with parallax.parallelize(model, optimizers, timeout_seconds=60, **options) as session:
        take_steps(session, model, optimizers, CASE)
        note = {
            "num_workers": session.num_workers,
            "local_rank": session.local_rank,
            "workers": session.hosts.workers,
            "names": session.hosts.names,
            "index": session.hosts.index,
            "route": session.plan[model.table_name].route.value,
            "listens": listening_addresses(),
        }
        (directory / f"worker-{session.rank}.json").write_text(json.dumps(note))
        state = session.state_dict()
        if session.rank == 0:
            torch.save(state, directory / "state.pt")


def expected() -> dict[str, Tensor]:
    """One process on the joined batch."""
    return train_alone(CASE)


def found(directory: Path, num_workers: int) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The parameters, and each worker's note."""
    notes = [
        json.loads((directory / f"worker-{rank}.json").read_text()) for rank in range(num_workers)
    ]
    return torch.load(directory / "state.pt", weights_only=True), notes


def listening_addresses() -> dict[str, str]:
    """Port → address of each TCP socket on which this process listens."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one that listed them
            continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                address, port = fields[1].split(":")
                found[str(int(port, 16))] = address
    return found


if __name__ == "__main__":
    if len(sys.argv) > 2:
        socket.sethostname(sys.argv[2])
    train(Path(sys.argv[1]))
