"""Bytes: what the ledger counts, what `cost` predicts and what the kernel's interface saw."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.planning import cost
from parallax.tables.rowmap import RowMap
from tests.support.workers import run_workers

ROWS, WIDTH, TOUCHED, STEPS = 40_000, 128, 3_000, 4
ROW_BYTES = WIDTH * 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.hidden = nn.Linear(WIDTH, 1024)

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(self.table(ids)).pow(2).mean()


def interface_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise AssertionError("no loopback interface")


def train() -> dict[str, float]:
    import parallax

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer)
    generator = torch.Generator().manual_seed(session.rank)
    rows = 0
    for step in range(STEPS + 1):
        if step == 1:  # the first step lays out buckets
            dist.barrier()
            start = interface_bytes()
        # As many rows of each owner, so that exactly (N-1)/N of them are remote.
        places = torch.randperm(ROWS // session.num_workers, generator=generator)
        chosen = places[: TOUCHED // session.num_workers]
        row_map = RowMap.even(ROWS, session.num_workers)
        ids = torch.cat([row_map.ids_of(owner)[chosen] for owner in range(session.num_workers)])
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    table = [record.parameters["table.weight"] for record in list(session.ledger.steps)[1:]]
    dense = [record.parameters["hidden.weight"] for record in list(session.ledger.steps)[1:]]
    rows = sum(entry.rows for entry in table)
    return {
        "interface": interface_bytes() - start,
        "table": sum(entry.sent_bytes for entry in table),
        "received": sum(entry.received_bytes for entry in table),
        "dense": sum(entry.sent_bytes for entry in dense),
        "all": sum(record.sent_bytes for record in list(session.ledger.steps)[1:]),
        "rows": rows,
        "seconds": min(*(entry.seconds for entry in table), *(entry.seconds for entry in dense)),
    }


@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_ledger_counts_what_cost_predicts(num_workers: int) -> None:
    found = run_workers(train, num_workers)
    for worker in found:
        assert worker["rows"] == TOUCHED * STEPS
        dense = cost.allreduce_bytes(WIDTH * 1024 * 4, num_workers) * STEPS
        assert worker["dense"] == pytest.approx(dense, rel=1e-9)
    predicted = cost.sharded_bytes(TOUCHED, ROW_BYTES, num_workers) * STEPS * num_workers
    assert sum(worker["table"] for worker in found) == predicted
    assert sum(worker["received"] for worker in found) == predicted
    assert all(worker["seconds"] > 0 for worker in found)


def look_up_twice() -> list[int]:
    import parallax

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer)
    ids = torch.arange(100)
    (model(ids) + model(ids + 10)).backward()
    optimizer.step()
    return [session.ledger.steps[0].parameters["table.weight"].rows]


def test_a_row_is_pulled_once_a_step() -> None:
    assert run_workers(look_up_twice, 2) == [[110], [110]]


def look_up_frozen() -> dict[str, float]:
    import parallax

    model = Net()
    model.table.requires_grad_(False)
    optimizer = torch.optim.SGD(model.hidden.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer)
    model(torch.arange(100)).backward()
    optimizer.step()
    return session.ledger.mean_bytes()


def test_frozen_tables_do_not_travel() -> None:
    assert "table.weight" not in run_workers(look_up_frozen, 2)[0]


def measure(num_workers: int) -> None:
    """In a network of its own: nobody else's bytes pass its loopback."""
    found = run_workers(train, num_workers)
    # Barriers at both ends and headers are small beside it; each byte counts once, as sent.
    interface = max(worker["interface"] for worker in found)
    ledger = sum(worker["all"] for worker in found)
    formula = (
        num_workers
        * STEPS
        * (
            2 * TOUCHED * ROW_BYTES * (num_workers - 1) / num_workers
            + 2 * TOUCHED * cost.ID_BYTES * (num_workers - 1) / num_workers
            + cost.allreduce_bytes((WIDTH + 1) * 1024 * 4, num_workers)
        )
    )
    print(f"interface {interface}, ledger {ledger:.0f}, formula {formula:.0f}")
    assert ledger <= interface <= 1.05 * ledger
    assert interface <= 1.05 * formula


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="a network namespace of its own needs root, ip and unshare",
)
@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_interface_carries_what_the_ledger_counts(num_workers: int) -> None:
    code = f"from tests.multiprocess.test_bytes import measure; measure({num_workers})"
    inside = f"ip link set lo up && exec {sys.executable} -c '{code}'"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", inside],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
