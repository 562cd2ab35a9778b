"""Links become slower and a worker faster while a training runs: the run tells."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed
from parallax.observability.journal import read
from tests.support.beds import run_on_bed

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        Testbed.missing() is not None, reason=f"no test bed here: {Testbed.missing()}"
    ),
]

TRAIN = """
import sys, time
from pathlib import Path
import torch
from torch import nn
import parallax

folder = Path(sys.argv[1])
model = nn.Embedding(20_000, 128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# Without trials of the plan, which would come first.
session = parallax.parallelize(model, optimizer, run_dir=str(folder / "run"), replan=False)
generator = torch.Generator().manual_seed(session.rank)
for step in range(106):  # Looked at after 25 steps and after 105.
    if step == 26:
        # Between two steps, and all stand still: what is seen before and after is of one kind.
        session.state_dict()
        (folder / f"waits-{session.rank}").touch()
        while not (folder / "slow").exists():
            time.sleep(0.01)
    if step < 26 and session.rank == 1:
        time.sleep(0.1)
    optimizer.zero_grad()
    # So many that the link takes 0.1 s in the end, far more than a busy machine's own delays.
    model(torch.randint(20_000, (1000,), generator=generator)).square().mean().backward()
    time.sleep(0.005)
    optimizer.step()
session.close()
"""


def test_what_has_changed_is_measured_again_and_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with Testbed(2, ssh="off") as bed:
        for host in bed.hosts:
            bed.shape(host, "200mbit")
        workers = run_on_bed(bed, script, str(tmp_path), per_host=1, log=tmp_path / "log")
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("waits-*"))) < 2:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        for host in bed.hosts:
            bed.shape(host, "40mbit")
        (tmp_path / "slow").touch()
        for worker in workers:
            assert worker.wait(90) == 0, (tmp_path / "log").read_text()
    events = read(tmp_path / "run")
    links = [event["between"] for event in events if event["kind"] == "cluster"]
    rates = [link["bytes_per_second"] * 8e-6 for link in links]
    assert rates[0] == pytest.approx(200, rel=0.2)
    assert rates[-1] == pytest.approx(40, rel=0.2)
    # The bed lets 512 kB pass at once, of which no more is seen than this link carries in 40 ms.
    assert 0 < links[-1]["burst_bytes"] < 1.3 * 0.04 * 40e6 / 8
    for event in events:
        if event["kind"] == "cluster":
            assert 0 < event["ring_seconds"] < 0.1
    notes = [event["why"] for event in events if event["kind"] == "note"]
    assert any(note.startswith("links between hosts carry") for note in notes), notes
    assert any(note.startswith("worker 1 computes") for note in notes), notes
