"""Two hosts with two workers each: what their links carry, by the kernel's counters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.testbed import Testbed
from parallax.tables.rowmap import RowMap
from tests.support.beds import run_on_bed

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        Testbed.missing() is not None, reason=f"no test bed here: {Testbed.missing()}"
    ),
]

ROWS, WIDTH, STEPS, FIRST = 6_000, 128, 8, 2

TRAIN = f"""
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
import parallax

interface, out = sys.argv[1:]

def sent():
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name == interface:
            return int(counts.split()[8])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.tags = nn.Embedding({ROWS}, {WIDTH}), nn.Embedding({ROWS}, {WIDTH})

    def forward(self, ids):
        return (self.words(ids[:, 0]) * self.tags(ids[:, 1])).square().mean()

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# Without lookahead, which pulls rows of a step before it begins.
session = parallax.parallelize(model, optimizer, lookahead=False)
generator = torch.Generator().manual_seed(0)
# As words of a text have them: the number k in proportion to 1/k.
ids = ({ROWS} ** torch.rand({STEPS} * 4 * 1500, 2, generator=generator)).long() - 1
mine, marks = [], []
for step, batch in enumerate(session.shard(DataLoader(ids, 1500))):
    if step == {FIRST}:
        dist.barrier()
        marks.append(sent())
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()
    mine.append(batch)
dist.barrier()
marks.append(sent())
torch.save(torch.stack(mine), f"{{out}}/ids-{{session.rank}}.pt")
told = {{"sent": marks[1] - marks[0], "hosts": session.plan.num_hosts}}
Path(f"{{out}}/result-{{session.rank}}.json").write_text(json.dumps(told))
dist.barrier()
"""


def test_a_link_carries_each_row_of_a_host_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with Testbed(2, ssh="off") as bed:
        folder = str(tmp_path)
        workers = run_on_bed(bed, script, bed.interface, folder, per_host=2, log=tmp_path / "log")
        for worker in workers:
            assert worker.wait(90) == 0, (tmp_path / "log").read_text()
    ids = [torch.load(tmp_path / f"ids-{rank}.pt") for rank in range(4)]
    for ranks in ((0, 1), (2, 3)):
        told = json.loads((tmp_path / f"result-{ranks[0]}.json").read_text())
        assert told["hosts"] == 2
        alone = together = 0
        for step in range(FIRST, STEPS):
            for column in (0, 1):
                each = [ids[rank][step, :, column].unique() for rank in ranks]
                alone += sum(map(away_from(ranks), each))
                together += away_from(ranks)(torch.cat(each).unique())
        assert together < 0.9 * alone
        # Rows and ids each way.
        expected = 2 * together * (4 * WIDTH + 4)
        assert told["sent"] == pytest.approx(expected, rel=0.05)


def away_from(ranks: tuple[int, ...]):
    """How many rows of some have owners on another host."""
    row_map = RowMap.even(ROWS, 4)
    return lambda rows: int(
        (~torch.isin(row_map.owners(row_map.slots(rows)), torch.tensor(ranks))).sum()
    )
