"""A run's folder: what was planned and moved, also of a run that was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from parallax.launch import outlook
from parallax.launch.command import main
from tests.support.workers import outcomes_of, run_workers

ROWS, WIDTH, BATCH = 4000, 64, 256


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).square().mean()


def train(folder: str, num_steps: int = 40, dies: bool = False, used_whole: bool = False) -> str:
    import parallax

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, run_dir=folder)
    data: Any = torch.randint(ROWS, (num_steps * BATCH * session.num_workers,))
    for step, ids in enumerate(session.shard(DataLoader(data, BATCH))):
        loss = model(ids)
        if used_whole and step == 20:
            loss = loss + model.table.weight.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dies and step == 30 and session.rank == 0:
            session._course._watch.write_steps()
            os.kill(os.getpid(), signal.SIGKILL)
    text = str(session.plan)
    session.close()
    return text


@pytest.mark.parametrize("num_workers", [2, 3])
def test_predicted_bytes_are_those_that_were_seen(num_workers: int, tmp_path: Path) -> None:
    text = run_workers(train, num_workers, str(tmp_path))[0]
    run = outlook.Run.of(str(tmp_path))
    assert run.mean is not None
    assert run.cluster is not None
    seen = run.plan.observed(run.mean, run.cluster)
    for line in seen.parameters:
        assert line.predicted_bytes == pytest.approx(line.bytes_per_step, rel=0.05)
    assert seen["table.weight"].route.value == "sharded"
    assert "A step takes" in text
    assert "predicted were" in text
    assert run.mean.samples == pytest.approx(BATCH, rel=0.1)


def test_one_worker_writes_its_plan_too(tmp_path: Path) -> None:
    train(str(tmp_path))
    run = outlook.Run.of(str(tmp_path))
    assert run.cluster is None
    assert [line.route.value for line in run.plan.parameters] == ["local"] * 3


def test_a_killed_run_can_be_read(tmp_path: Path) -> None:
    outcomes = outcomes_of(train, 2, str(tmp_path), 1000, True)
    assert outcomes[0].exit_code == -signal.SIGKILL
    run = outlook.Run.of(str(tmp_path))
    assert run.mean is not None
    assert run.mean.step == 30


@pytest.mark.filterwarnings("ignore:parameter .* is used whole")
def test_a_change_of_the_plan_is_written_with_its_reason(tmp_path: Path) -> None:
    run_workers(train, 2, str(tmp_path), 40, False, True)
    run = outlook.Run.of(str(tmp_path))
    assert run.plan["table.weight"].route.value == "all-reduce"
    assert len(run.changes) == 2
    assert run.changes[1].startswith("step 20: 'table.weight': used whole by")


def test_a_folder_that_cannot_be_written_is_an_error_on_all_workers(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for outcome in outcomes_of(train, 2, str(tmp_path / "file")):
        assert "Config.run_dir: cannot write" in str(outcome.error)


def test_the_command_shows_it_and_asks_what_if(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_workers(train, 2, str(tmp_path))
    picture = tmp_path / "scaling.png"
    words = ["--hosts", "16", "--workers-per-host", "8", "--rate", "100gbit"]
    assert main(["plan", str(tmp_path), *words, "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "Plan for 2 workers" in shown
    assert "How it came about" in shown
    assert "16 hosts × 8 workers (between: 100.0 Gbit/s" in shown
    assert "Links between hosts" not in shown  # there is one host only
    for architecture in ("all-reduce only", "sharded only", "hybrid"):
        assert architecture in shown
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "fast"], "'fast' is not a rate: say 200mbit, 1gbit or 100gbit"),
        (["--hosts", "4"], "the run did not measure its links: give --rate, say --rate 100gbit"),
        (["--rate", "1gbit", "--plot", "a.xyz"], "--plot 'a.xyz': Format 'xyz'"),
    ],
)
def test_what_is_wrong_is_named(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(str(tmp_path))  # by one worker
    assert main(["plan", str(tmp_path), *words]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert not told.out
    assert main(["plan", str(tmp_path / "nowhere")]) == 2
    assert "A run's folder is what its script gave" in capsys.readouterr().err
