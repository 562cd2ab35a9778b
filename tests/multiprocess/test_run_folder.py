"""A run's folder: what was planned and moved, also of a run that was killed."""

from __future__ import annotations

import json
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
from parallax.observability.journal import Journal
from parallax.planning.plan import Plan
from tests.support.workers import outcomes_of, run_workers

ROWS, WIDTH, BATCH = 4000, 64, 256


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).square().mean()


def train(
    folder: str,
    num_steps: int = 40,
    dies: bool = False,
    used_whole: bool = False,
    lookahead: bool = True,
) -> str:
    import parallax
    from parallax.comm import pull

    pull.EARLY_BYTES = 0
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, run_dir=folder, lookahead=lookahead)
    data: Any = torch.randint(ROWS, (num_steps * BATCH * session.num_workers,))
    for step, ids in enumerate(session.shard(DataLoader(data, BATCH))):
        loss = model(ids)
        if used_whole and step == 20:
            loss = loss + model.table.weight.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dies and step == 30 and session.rank == 0:
            session._training.adaptive_plan._run_log.write_steps()
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
    assert run.cluster.ring_seconds is not None
    assert run.mean.backward_seconds > 0
    seen = run.plan.observed(run.mean, run.cluster)
    for line in seen.parameters:
        assert line.predicted_bytes == pytest.approx(line.bytes_per_step, rel=0.05)
    assert seen["table.weight"].route.value == "sharded"
    assert "A step takes" in text
    assert "predicted were" in text
    assert run.mean.samples == pytest.approx(BATCH, rel=0.1)
    # Most rows of a batch are none of the batch before.
    early = seen["table.weight"].early_share
    assert early is not None
    assert 0.5 < early < 1
    assert f"{early:.0%}" in str(seen)


def test_rows_that_are_not_prefetched_are_told(tmp_path: Path) -> None:
    run_workers(train, 2, str(tmp_path), 40, False, False, False)
    run = outlook.Run.of(str(tmp_path))
    assert run.mean is not None
    seen = run.plan.observed(run.mean, run.cluster)
    assert seen["table.weight"].early_share == 0
    assert seen["out.weight"].early_share is None


def test_one_worker_writes_its_plan_too(tmp_path: Path) -> None:
    train(str(tmp_path))
    run = outlook.Run.of(str(tmp_path))
    assert run.cluster is None
    assert [line.route.value for line in run.plan.parameters] == ["local"] * 3


def accumulate(folder: str) -> list[tuple[str, float | None, float | None]]:
    """Four backwards a step, each reduced: bytes a step, seen and predicted."""
    import parallax
    from parallax.comm import pull

    pull.EARLY_BYTES = 0
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, run_dir=folder)
    for _ in range(12):
        for ids in torch.randperm(ROWS).split(ROWS // 4):
            model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [(p.route.value, p.bytes_per_step, p.predicted_bytes) for p in session.plan.parameters]
    session.close()
    return found


def test_each_backward_of_a_step_is_counted(tmp_path: Path) -> None:
    table, *dense = run_workers(accumulate, 2, str(tmp_path))[0]
    # Whole it would cost four times as much; a step touches all rows, a backward a quarter.
    assert table[0] == "sharded"
    for _, seen, predicted in (table, *dense):
        assert predicted == pytest.approx(seen, rel=0.05)
    assert dense[0][1] == pytest.approx(4 * WIDTH * 64 * 4)


def evaluate(folder: str) -> tuple[str, Any, Any]:
    """Steps touch few rows, evaluations between them all."""
    import parallax
    from parallax.observability.ledger import Entry

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, run_dir=folder)
    for step in range(12):
        model(torch.randperm(ROWS)[:100]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            with torch.no_grad():
                model(torch.arange(ROWS))
    line, entry = session.plan["table.weight"], session.ledger.totals["table.weight"]
    evaluated: Entry = session.ledger.evaluation["table.weight"]
    interrupted = [record.is_interrupted for record in session.ledger.steps]
    session.close()
    assert interrupted == [step % 3 == 1 for step in range(12)]
    assert line.predicted_bytes == pytest.approx(line.bytes_per_step, rel=0.05)
    return line.route.value, entry, evaluated


def test_an_evaluation_is_not_part_of_a_step(tmp_path: Path) -> None:
    route, trained, evaluated = run_workers(evaluate, 2, str(tmp_path))[0]
    assert route == "sharded"
    assert trained.rows == trained.asked_rows == 12 * 100
    assert evaluated.rows == evaluated.asked_rows == 4 * ROWS
    assert evaluated.sent_bytes == 4 * ROWS / 2 * (4 * WIDTH + 4)
    assert evaluated.updated_rows == 0


def test_only_steps_of_the_last_plan_are_compared_with_it(tmp_path: Path) -> None:
    def steps(seconds: float) -> None:
        mean = {"step": 1, "seconds": seconds, "parameters": {}}
        journal.write("steps", number=10, mean=mean)

    journal = Journal(tmp_path)
    plan = json.loads(Plan(2, ()).to_json())
    journal.write("plan", step=0, why="first", plan=plan)
    for seconds in (9.0, 2.0, 2.0):
        steps(seconds)
    run = outlook.Run.of(str(tmp_path))
    assert run.mean is not None
    assert run.mean.seconds == 2.0
    journal.write("plan", step=30, why="moved", plan=plan)
    run = outlook.Run.of(str(tmp_path))  # There are none of it yet.
    assert run.mean is not None
    assert run.mean.seconds == 2.0
    for seconds in (9.0, 1.0, 1.0):
        steps(seconds)
    run = outlook.Run.of(str(tmp_path))
    assert run.mean is not None
    assert run.mean.seconds == 1.0
    assert run.changes == ("step 0: first", "step 30: moved")


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
    assert "messages of a worker" in shown
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
