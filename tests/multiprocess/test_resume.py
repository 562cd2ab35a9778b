"""A job that saves by itself, breaks off and is resumed ends where one left alone does."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, StepLR
from torch.utils.data import DataLoader, Dataset

import parallax
from parallax.checkpoint import autosave, schedule
from parallax.checkpoint.schedule import Schedule
from parallax.errors import CheckpointError, MismatchError, PeerError
from tests.support.workers import outcomes_of, run_workers

NUM_ROWS, WIDTH, NUM_SAMPLES, BATCH = 19, 4, 23, 4
STEPS_PER_EPOCH, NUM_EPOCHS = 6, 3


class Model(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH)
        self.few = nn.Embedding(3, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.table(ids) + self.few(ids % 3)
        return (torch.tanh(self.out(hidden)).squeeze(-1) - targets).pow(2).mean()


class Samples(Dataset[Any]):
    """Sample i is i, a skewed id and a target; with `noise` some of it is drawn when it is read."""

    def __init__(self, noise: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.noise = noise
        self.ids = (torch.rand(NUM_SAMPLES, generator=generator) ** 2 * NUM_ROWS).long()
        self.targets = torch.randn(NUM_SAMPLES, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        noise = torch.rand((), dtype=torch.float64) if self.noise else 0.0
        return index, self.ids[index], self.targets[index] + noise


@dataclass
class Job:
    """A worker's run of a script; it ends after `stops_at` steps, as if it had been killed."""

    options: dict[str, Any] = field(default_factory=dict)
    resume: Path | None = None
    stops_at: int | None = None
    seen: list[tuple[int, str, int, int]] = field(default_factory=list)
    """Step, loader, epoch and sample of all that this worker was given to train on."""
    resumed_at: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    logged: list[str] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)


class Killed(Exception):
    """In place of a signal: nothing of the session is done any more."""


@contextmanager
def environment(**variables: object) -> Iterator[None]:
    given = {name: str(value) for name, value in variables.items() if value is not None}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


@contextmanager
def logged(found: list[str]) -> Iterator[None]:
    handler = logging.Handler()
    handler.emit = lambda record: found.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("parallax")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


def run(script: Callable[[Job, parallax.Session, Model, list[Optimizer]], None], job: Job) -> Job:
    torch.manual_seed(3 if job.resume is None else 77)
    model = Model().double()
    tables = [*model.table.parameters(), *model.few.parameters()]
    optimizers: list[Optimizer] = [
        torch.optim.Adagrad(tables, lr=0.2),
        torch.optim.Adagrad(model.out.parameters(), lr=0.1),
    ]
    with logged(job.logged), environment(PARALLAX_RESUME=job.resume):
        session = parallax.parallelize(model, optimizers, timeout_seconds=60, **job.options)
    with session, logged(job.logged):
        job.resumed_at = session.step
        try:
            script(job, session, model, optimizers)
        except Killed:
            return job
        job.state = session.state_dict()
    return job


def train(
    job: Job,
    session: parallax.Session,
    model: Model,
    optimizers: list[Optimizer],
    batch: Any,
    epoch: int,
    loader: str = "",
) -> None:
    """One step, which may be the last."""
    backward(job, session, model, batch, epoch, loader)
    step(job, session, optimizers)


def backward(
    job: Job, session: parallax.Session, model: Model, batch: Any, epoch: int, loader: str = ""
) -> None:
    samples, ids, targets = batch
    job.seen += [(session.step, loader, epoch, sample) for sample in samples.tolist()]
    model(ids, targets).backward()


def step(job: Job, session: parallax.Session, optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    job.rates.append([each.param_groups[0]["lr"] for each in optimizers])
    if session.step == job.stops_at:
        raise Killed


def sharded(session: parallax.Session, **options: Any) -> Any:
    loader = DataLoader(Samples(options.pop("noise", False)), BATCH, shuffle=True, **options)
    return session.shard(loader, split=True)


# Scripts ----------------------------------------------------------------------------------


def plain(job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]) -> None:
    loader = sharded(session)
    for epoch in session.epochs(NUM_EPOCHS):
        for batch in loader:
            train(job, session, model, optimizers, batch, epoch)


def noisy(job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]) -> None:
    """Draws random numbers for each sample: at the same number of workers they are the same."""
    loader = sharded(session, noise=True)
    for epoch in session.epochs(NUM_EPOCHS):
        for batch in loader:
            train(job, session, model, optimizers, batch, epoch)


def anew(job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]) -> None:
    """Shards for each epoch anew."""
    loader = DataLoader(Samples(), BATCH, shuffle=True)
    for epoch in session.epochs(NUM_EPOCHS):
        for batch in session.shard(loader, split=True):
            train(job, session, model, optimizers, batch, epoch)


def scheduled(
    job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]
) -> None:
    """Schedulers by epoch and by step, evaluation in the midst and at the end of an epoch."""
    loader, others = sharded(session), sharded(session)
    by_epoch = StepLR(optimizers[0], step_size=1, gamma=0.5)
    by_step = LambdaLR(optimizers[1], lambda count: 1 / (1 + count))
    at_some = MultiStepLR(optimizers[0], [1, 2], gamma=0.9)
    for name, each in {"epoch": by_epoch, "step": by_step, "some": at_some}.items():
        session.attach(name, each)
    for epoch in session.epochs(NUM_EPOCHS):
        for number, batch in enumerate(loader):
            train(job, session, model, optimizers, batch, epoch)
            by_step.step()
            if number % 2:
                evaluate(model, others, 2)
        evaluate(model, others, None)
        by_epoch.step()
        at_some.step()


@torch.no_grad()
def evaluate(model: Model, loader: Any, most: int | None) -> None:
    for number, (_, ids, targets) in enumerate(loader):
        model(ids, targets)
        if number + 1 == most:
            break


def accumulated(
    job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]
) -> None:
    """Two batches a step, the first without a reduction."""
    loader = sharded(session)
    for epoch in session.epochs(NUM_EPOCHS):
        for number, batch in enumerate(loader):
            if (number + job.resumed_at * 2) % 2 == 0:
                with session.no_sync():
                    backward(job, session, model, batch, epoch)
            else:
                train(job, session, model, optimizers, batch, epoch)


def several(job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]) -> None:
    """Two loaders side by side, and a third one after them."""
    first, second, third = (sharded(session) for _ in range(3))
    for epoch in session.epochs(NUM_EPOCHS):
        for a, b in zip(first, second, strict=False):
            backward(job, session, model, a, epoch, "a")
            train(job, session, model, optimizers, b, epoch, "b")
        for c in third:
            train(job, session, model, optimizers, c, epoch, "c")


def short(job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]) -> None:
    """Leaves every epoch after four batches, and saves there by itself too."""
    loader = sharded(session)
    for epoch in session.epochs(NUM_EPOCHS):
        for batch in loader:
            train(job, session, model, optimizers, batch, epoch)
            if session.step % 4 == 0:
                break


def fed(job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]) -> None:
    """Finds its batches by the step."""
    samples = Samples()
    while session.step < STEPS_PER_EPOCH * NUM_EPOCHS:
        generator = torch.Generator().manual_seed(session.step)
        chosen = torch.randint(NUM_SAMPLES, (BATCH,), generator=generator)
        feed(job, session, model, optimizers, samples, chosen)


def drawn(job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]) -> None:
    """Draws its batches: at the same number of workers they are the same."""
    samples = Samples()
    if job.resume is None:
        torch.manual_seed(5)
    while session.step < STEPS_PER_EPOCH * NUM_EPOCHS:
        chosen = torch.randint(NUM_SAMPLES, (BATCH,))
        feed(job, session, model, optimizers, samples, chosen)


def feed(
    job: Job,
    session: parallax.Session,
    model: Model,
    optimizers: list[Optimizer],
    samples: Samples,
    chosen: Tensor,
) -> None:
    mine = chosen[session.rank :: session.num_workers]
    session.weight(len(mine))
    batch = (mine, samples.ids[mine], samples.targets[mine])
    train(job, session, model, optimizers, batch, 0)


def alternating(
    job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]
) -> None:
    """Feeds itself; each optimizer has a backward of its own."""
    samples = Samples()
    while session.step < STEPS_PER_EPOCH * NUM_EPOCHS:
        for optimizer in optimizers:
            chosen = torch.arange(session.rank, NUM_SAMPLES, session.num_workers)
            session.weight(len(chosen))
            model(samples.ids[chosen], samples.targets[chosen]).backward()
            optimizer.step()
            model.zero_grad()
        job.rates.append([])
        if session.step == job.stops_at:
            raise Killed


def ending(job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]) -> None:
    """Feeds itself at the end of each epoch."""
    loader, samples = sharded(session), Samples()
    for epoch in session.epochs(NUM_EPOCHS):
        for batch in loader:
            train(job, session, model, optimizers, batch, epoch)
        for number in range(3):
            feed(job, session, model, optimizers, samples, torch.arange(number, NUM_SAMPLES, 5))


SCRIPTS = {
    each.__name__: each
    for each in (
        *(plain, noisy, anew, scheduled, accumulated, several, short, ending),
        *(fed, drawn, alternating),
    )
}

# Exactness --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    script: str
    saves_every: int
    stops_at: int
    resumes_at: int
    nows: tuple[int, ...] = (1, 2, 3)

    def __str__(self) -> str:
        return f"{self.script}-{self.resumes_at}"


CASES = [
    Case("plain", 4, 11, 8),
    Case("plain", 6, 11, 6),  # an epoch's end
    Case("plain", 6, 12, 6, (1, 3)),  # the next one was due, and its save point never came
    Case("noisy", 5, 8, 5, (2,)),
    Case("noisy", 6, 8, 6, (2,)),
    Case("anew", 7, 9, 7, (1, 3)),
    Case("anew", 6, 9, 6, (1, 3)),
    Case("scheduled", 4, 11, 8),
    Case("scheduled", 6, 9, 6),
    Case("accumulated", 4, 7, 4),
    Case("several", 8, 19, 16, (1, 3)),
    Case("several", 9, 11, 9, (1, 3)),
    Case("several", 18, 20, 18, (2,)),  # between the loaders of an epoch
    Case("ending", 6, 10, 9, (2,)),
    Case("ending", 7, 10, 9, (3,)),
    Case("short", 5, 9, 5, (3,)),
    Case("short", 4, 7, 4, (1,)),
    Case("fed", 4, 7, 4, (1, 3)),
    Case("drawn", 4, 7, 4, (2,)),
    Case("alternating", 4, 7, 4, (1, 3)),
]


def each(jobs: list[tuple[str, Job]]) -> list[Job]:
    """A worker that runs many scripts one after the other: starting it takes the longest."""
    return [run(SCRIPTS[name], job) for name, job in jobs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Case, int], tuple[Any, Any, Any]]:
    """By case and new number of workers: what each worker did left alone, before, and after."""
    folder = tmp_path_factory.mktemp("resume")
    paths = {case: folder / str(index) for index, case in enumerate(CASES)}
    alone = {name: Job() for name in SCRIPTS}
    begun = {
        case: Job(
            {"checkpoint_dir": str(paths[case]), "checkpoint_steps": case.saves_every},
            stops_at=case.stops_at,
        )
        for case in CASES
    }
    done = run_workers(
        each, 2, [*alone.items(), *((case.script, job) for case, job in begun.items())]
    )
    found: dict[tuple[Case, int], tuple[Any, Any, Any]] = {}
    for now in (1, 2, 3):
        cases = [case for case in CASES if now in case.nows]
        copies = {case: folder / f"{paths[case].name}-{now}" for case in cases}
        for case, path in copies.items():
            shutil.copytree(paths[case], path)
        after = run_workers(
            each,
            now,
            [
                (case.script, Job({"checkpoint_steps": case.saves_every}, resume=copies[case]))
                for case in cases
            ],
        )
        for index, case in enumerate(cases):
            left_alone = [worker[list(SCRIPTS).index(case.script)] for worker in done]
            before = [worker[len(SCRIPTS) + CASES.index(case)] for worker in done]
            found[case, now] = left_alone, before, [worker[index] for worker in after]
    return found


RUNS = [(case, now) for case in CASES for now in case.nows]


@pytest.mark.parametrize("key", RUNS, ids=lambda key: f"{key[0]}-at-{key[1]}")
def test_a_resumed_job_ends_where_one_left_alone_does(
    key: tuple[Case, int], runs: dict[tuple[Case, int], tuple[Any, Any, Any]]
) -> None:
    alone, before, after = runs[key]
    assert {job.resumed_at for job in after} == {key[0].resumes_at}
    assert not before[0].state
    expected = alone[0].state
    assert after[0].state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(after[0].state[name], value, atol=1e-10, rtol=1e-10)
    assert after[0].rates == alone[0].rates[key[0].resumes_at :]


@pytest.mark.parametrize("key", RUNS, ids=lambda key: f"{key[0]}-at-{key[1]}")
def test_every_sample_is_seen_in_the_epoch_and_step_it_would_have_been(
    key: tuple[Case, int], runs: dict[tuple[Case, int], tuple[Any, Any, Any]]
) -> None:
    """A pass over a loader by the samples before the checkpoint, and those after it."""
    alone, before, after = runs[key]
    kept = [each for job in before for each in job.seen if each[0] < key[0].resumes_at]
    now = [each for job in after for each in job.seen]
    assert Counter(kept + now) == Counter(each for job in alone for each in job.seen)


def test_left_alone_every_sample_comes_once_an_epoch(
    runs: dict[tuple[Case, int], tuple[Any, Any, Any]],
) -> None:
    for (case, _), (alone, _, _) in runs.items():
        if case.script not in ("short", "ending", "fed", "drawn", "alternating"):
            counts = Counter(each[1:] for job in alone for each in job.seen)
            assert set(counts.values()) == {1}
            assert len(counts) % (NUM_SAMPLES * NUM_EPOCHS) == 0


def test_a_resume_says_where_it_goes_on(
    runs: dict[tuple[Case, int], tuple[Any, Any, Any]],
) -> None:
    _, _, after = runs[CASES[0], 3]
    lines = [line for job in after for line in job.logged if "resumed" in line]
    assert len(lines) == 1
    assert "step 8, saved by 2 workers, loaded by 3" in lines[0]
    assert not [line for job in after for line in job.logged if "WARNING" in line]


# The folder -------------------------------------------------------------------------------


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_the_last_are_kept_and_nothing_else_is_removed(tmp_path: Path) -> None:
    foreign = {
        "step-00000001": "notes.txt",  # the name of a checkpoint, with something else in it
        "step-00000003/step-00000003-0123456789abcdef": "photo.jpg",
        "step-2": "dense.pt",
        "logs": "train.log",
    }
    for folder, file in foreign.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).write_text("mine")
    (tmp_path / "step-00000999").write_text("a file")
    left = tmp_path / "step-00000005" / "step-00000005-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "part-00000-of-00002.pt").write_text("half")
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 4, "checkpoint_keep": 3}
    run_workers(run, 2, plain, Job(options))
    assert all((tmp_path / folder / file).exists() for folder, file in foreign.items())
    mine = {folder.split("/")[0] for folder in foreign} | {"step-00000999"}
    assert set(names(tmp_path)) - mine == {"step-00000008", "step-00000012", "step-00000016"}


def damage(path: Path, step: int, how: str) -> None:
    folder = next((path / f"step-{step:08d}").glob("step-*"))
    if how == "interrupted":
        (folder.parent / "manifest.json").unlink()
    elif how == "missing":
        next(folder.glob("part-*")).unlink()
    else:
        file = folder / "part-00001-of-00002.pt"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))


def test_interrupted_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 3, "checkpoint_keep": 9}
    run_workers(run, 2, plain, Job(options, stops_at=14))
    assert len(names(tmp_path)) == 4
    for step_, how in {12: "interrupted", 9: "changed", 6: "missing"}.items():
        damage(tmp_path, step_, how)
    found = run_workers(run, 3, plain, Job({"checkpoint_steps": 6}, resume=tmp_path))
    assert [job.resumed_at for job in found] == [3, 3, 3]
    warnings = [line for job in found for line in job.logged if "WARNING" in line]
    assert len(warnings) == 3
    for text, line in zip(("interrupted", "is missing", "was changed"), warnings, strict=True):
        assert text in line
    # The folder goes on in one line: what was of another is gone.
    assert names(tmp_path) == ["step-00000009", "step-00000015"]


def test_if_all_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 3}
    run_workers(run, 2, plain, Job(options, stops_at=4))
    damage(tmp_path, 3, "changed")
    messages = run_workers(refused, 2, Job(resume=tmp_path))
    assert all("are damaged" in message for message in messages)
    damage(tmp_path, 3, "missing")
    messages = run_workers(refused, 2, Job(resume=tmp_path))
    assert all("are damaged" in message for message in messages)


def refused(job: Job) -> str:
    with pytest.raises(CheckpointError) as caught:
        run(plain, job)
    return str(caught.value)


def test_two_trainings_do_not_mix(tmp_path: Path) -> None:
    """One that does not go on from the checkpoints that are there does not save among them."""
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 2}
    run_workers(run, 2, plain, Job(options, stops_at=3))
    for message in run_workers(refused, 2, Job(options)):
        assert "up to step 2" in message
        assert "--resume" in message


def go_back(path: Path) -> list[str]:
    def script(
        job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]
    ) -> None:
        loader = sharded(session)
        for epoch in session.epochs(1):
            for batch in loader:
                if session.step == 4 and job.stops_at is None:
                    job.stops_at = 4
                    session.load(path / "step-00000002")
                    break
                train(job, session, model, optimizers, batch, epoch)
        for batch in loader:
            train(job, session, model, optimizers, batch, epoch)

    options = {"checkpoint_dir": str(path), "checkpoint_steps": 1, "checkpoint_keep": 9}
    run(script, Job(options))
    return names(path)


def test_going_back_leaves_no_later_steps_behind(tmp_path: Path) -> None:
    assert run_workers(go_back, 1, tmp_path)[0] == [f"step-{each:08d}" for each in (1, 2, 3)]


def nothing_there(path: Path) -> list[str]:
    job = run(plain, Job({"checkpoint_seconds": 600.0}, resume=path / "none yet"))
    assert (job.resumed_at, job.seen[0][0]) == (0, 0)
    return job.logged


def test_without_a_checkpoint_training_begins_from_nothing(tmp_path: Path) -> None:
    lines = run_workers(nothing_there, 2, tmp_path)
    assert next(line for line in lines[0] if "begins from nothing" in line).startswith("INFO")
    assert not [line for worker in lines for line in worker if "WARNING" in line]


def saved_by_hand(path: Path, resumes: bool) -> tuple[int, list[int]]:
    """A script that saves by itself at the end of each epoch; `--resume` takes that folder too."""
    epochs = []

    def script(
        job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]
    ) -> None:
        loader = sharded(session)
        for epoch in session.epochs(4):
            epochs.append(epoch)
            for batch in loader:
                train(job, session, model, optimizers, batch, epoch)
                if session.step % 4 == 0:
                    break
            session.save(path)
            if epoch == 1 and not resumes:
                return

    job = run(script, Job(resume=path if resumes else None))
    return job.resumed_at, epochs


def test_an_epoch_that_was_left_is_done(tmp_path: Path) -> None:
    assert run_workers(saved_by_hand, 2, tmp_path, False)[0] == (0, [0, 1])
    assert run_workers(saved_by_hand, 3, tmp_path, True)[0] == (8, [2, 3])
    # And one that has none left says so.
    job = Job(resume=tmp_path)
    assert run_workers(run, 2, plain, job)[0].seen == []


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS + 1, WIDTH)


def resume_another_model(path: Path) -> str:
    model = Other().double()
    optimizer = torch.optim.Adagrad(model.parameters())
    with environment(PARALLAX_RESUME=path), pytest.raises(CheckpointError) as caught:
        parallax.parallelize(model, optimizer)
    parallax.parallelize(model, optimizer).close()  # nothing of the first is left
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_an_error(tmp_path: Path) -> None:
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 2}
    run_workers(run, 2, plain, Job(options, stops_at=5))
    for message in run_workers(resume_another_model, 2, tmp_path):
        assert "does not fit the model" in message


def save_unshared(path: Path, rank_has_resume: bool) -> str:
    """As on two hosts that have a folder of the same name, each its own."""
    own = path / f"host-{os.environ['RANK']}"
    own.mkdir(parents=True, exist_ok=True)
    os.chdir(own)
    options = {"checkpoint_steps": 2, "checkpoint_dir": "saved"}
    job = Job(options, resume=Path("saved") if rank_has_resume else None)
    return refused(job)


def test_storage_that_is_not_shared_is_an_error(tmp_path: Path) -> None:
    for message in run_workers(save_unshared, 2, tmp_path / "save", False):
        assert "in a file system that all of them share" in message
    run_workers(
        run, 1, plain, Job({"checkpoint_dir": str(tmp_path / "a"), "checkpoint_steps": 2}, None, 3)
    )
    for rank in (0, 1):
        (tmp_path / "load" / f"host-{rank}").mkdir(parents=True)
    shutil.copytree(tmp_path / "a", tmp_path / "load" / "host-0" / "saved")
    for message in run_workers(save_unshared, 2, tmp_path / "load", True):
        assert "on storage that all hosts share" in message


def fill_the_disk(path: Path, failures: int, victim: int) -> Job:
    real, saves = autosave.save, []

    def save(*args: Any) -> None:
        saves.append(len(saves))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        full = 1 <= saves[-1] <= failures and int(os.environ["RANK"]) == victim
        if full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
        try:
            real(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    autosave.save = save
    job = Job({"checkpoint_dir": str(path), "checkpoint_steps": 4, "checkpoint_keep": 9})
    if failures == 1:
        return run(plain, job)
    message = refused(job)
    job.logged.append(message)
    return job


@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_may_fail_once(victim: int, tmp_path: Path) -> None:
    for job in run_workers(fill_the_disk, 2, tmp_path, 1, victim):
        errors = [line for line in job.logged if "ERROR" in line]
        assert len(errors) == 1
        assert "File too large" in errors[0]
    assert names(tmp_path) == ["step-00000004", "step-00000012", "step-00000016"]


def test_a_save_may_not_fail_twice(tmp_path: Path) -> None:
    for job in run_workers(fill_the_disk, 2, tmp_path, 2, 1):
        assert "File too large" in job.logged[-1]
        assert job.seen[-1][0] == 11


# Time -------------------------------------------------------------------------------------


def save_by_time(path: Path, script: str) -> tuple[list[str], int]:
    """The workers' clocks differ by hours and run at different speeds; rank 0's is the one."""
    rank = int(os.environ["RANK"])
    ticks = [0.0]

    def clock() -> float:
        ticks[0] += 1.0 + 10 * rank
        return ticks[0] + 7200 * rank

    schedule.monotonic = clock
    options = {"checkpoint_dir": str(path), "checkpoint_seconds": 5.0, "checkpoint_keep": 99}
    job = run(SCRIPTS[script], Job(options))
    return [line for line in job.logged if "saved" in line], len(job.seen)


@pytest.mark.parametrize("script", ["plain", "accumulated", "fed"])
def test_rank_0s_clock_decides_for_all(script: str, tmp_path: Path) -> None:
    lines = run_workers(save_by_time, 3, tmp_path, script)
    assert not any(lines[rank][0] for rank in (1, 2))
    steps = sorted(int(name.removeprefix("step-")) for name in names(tmp_path))
    assert steps
    # The clock is read once in each reduction, and once when it is started anew.
    num_steps = 9 if script == "accumulated" else 18
    assert steps == [each for each in range(5, num_steps) if each % 5 == 0]


def test_steps_or_seconds_whichever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(schedule, "monotonic", lambda: now[0])
    both = Schedule(10, 5.0)
    assert not both.steps_are_up(9)
    assert both.steps_are_up(10)
    both.restart(12)
    assert not both.steps_are_up(21)
    now[0] = 4.9
    assert not both.time_is_up()
    now[0] = 5.0
    assert both.time_is_up()
    assert str(both) == "every 10 steps or 5 s"
    assert Schedule(None, None).seconds == 600
    assert Schedule(3, None).seconds is None
    assert not Schedule(3, None).time_is_up()


# What a script says -----------------------------------------------------------------------


def counts_from_0(path: Path, resumes: bool) -> list[str]:
    def script(
        job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]
    ) -> None:
        loader = sharded(session)
        for epoch in range(2):
            for batch in loader:
                train(job, session, model, optimizers, batch, epoch)

    if resumes:
        return run(script, Job(resume=path)).logged
    options = {"checkpoint_dir": str(path), "checkpoint_steps": 5}
    return run(script, Job(options, stops_at=11)).logged


def test_a_loop_that_begins_with_0_again_is_warned_of(tmp_path: Path) -> None:
    run_workers(counts_from_0, 2, tmp_path, False)
    lines = run_workers(counts_from_0, 2, tmp_path, True)
    warnings = [[line for line in worker if "WARNING" in line] for worker in lines]
    assert len(warnings[0]) == 1
    assert "session.epochs(n)" in warnings[0][0]
    assert not warnings[1]


class Tally:
    """Counters of a script's own."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def attach_things(path: Path, resumes: bool) -> tuple[list[Any], list[str]]:
    values: list[Any] = []

    def script(
        job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]
    ) -> None:
        tally, late = Tally(session.rank), Tally("late")
        session.attach("tally", tally)
        session.attach("late" if resumes else "lost", late)
        values.extend([tally.value, late.value])
        with pytest.raises(parallax.errors.ConfigError, match="a name of its own"):
            session.attach("tally", Tally())
        with pytest.raises(parallax.errors.ConfigError, match="has no state_dict"):
            session.attach("number", 3)
        with pytest.raises(parallax.errors.ConfigError, match="in every checkpoint already"):
            session.attach("model", model)
        with pytest.raises(CheckpointError, match="the state of 'lock'.* is a Lock|lock"):
            session.attach("lock", Tally(threading.Lock()))
        loader = sharded(session)
        for epoch in session.epochs(1 + resumes):
            for batch in loader:
                train(job, session, model, optimizers, batch, epoch)
                tally.value += 10
        session.save(path)
        tally.value = "forgotten"
        session.load(path)
        values.append(tally.value)

    job = run(script, Job(resume=path if resumes else None))
    return values, [line for line in job.logged if "WARNING" in line]


def test_what_is_attached_is_kept(tmp_path: Path) -> None:
    first = run_workers(attach_things, 2, tmp_path, False)
    assert [values for values, _ in first] == [[0, "late", 60], [1, "late", 60]]
    assert not first[0][1]
    second = run_workers(attach_things, 3, tmp_path, True)
    assert [values for values, _ in second] == [[60, "late", 120]] * 3
    assert "no state of 'late'" in second[0][1][0]
    assert "'lost', which the script has not attached" in second[0][1][1]
    assert len(second[0][1]) == 2
    assert not second[1][1]


def other_cadence() -> str:
    model = Model()
    steps = 5 + int(os.environ["RANK"])
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(MismatchError) as caught:
        parallax.parallelize(model, optimizer, checkpoint_dir="x", checkpoint_steps=steps)
    return str(caught.value)


def test_workers_with_different_cadences_are_refused() -> None:
    for message in run_workers(other_cadence, 2):
        assert "checkpoints every 5 steps" in message


# The step, as a launcher sees it ------------------------------------------------------------


def show_steps(path: Path, folder: Path, resume: Path | None) -> list[int]:
    file = path / os.environ["RANK"]
    shown: list[int] = []

    def script(
        job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]
    ) -> None:
        read = lambda: struct.unpack("<q", file.read_bytes())[0]  # noqa: E731
        shown.append(read())
        for batch in sharded(session):
            train(job, session, model, optimizers, batch, 0)
            shown.append(read())

    with environment(PARALLAX_STEP_FILE=file):
        run(script, Job({"checkpoint_dir": str(folder), "checkpoint_steps": 4}, resume))
    shown.append(struct.unpack("<q", file.read_bytes())[0])
    return shown


def test_the_step_is_shown_in_a_file(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).write_bytes(b"\xff" * 8)
    folder = tmp_path / "saved"
    assert run_workers(show_steps, 2, tmp_path, folder, None) == [[0, 1, 2, 3, 4, 5, 6, 6]] * 2
    assert run_workers(show_steps, 2, tmp_path, folder, folder) == [[4, 5, 6, 6]] * 2


def killed(path: Path) -> Job:
    def script(
        job: Job, session: parallax.Session, model: Model, optimizers: list[Optimizer]
    ) -> None:
        loader = sharded(session)
        for epoch in session.epochs(NUM_EPOCHS):
            for batch in loader:
                backward(job, session, model, batch, epoch)
                if session.step == 10 and session.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                step(job, session, optimizers)

    with environment(PARALLAX_STEP_FILE=path / os.environ["RANK"]):
        return run(script, Job({"checkpoint_steps": 4}, path / "saved"))


def test_a_killed_worker_has_shown_its_step_and_the_job_goes_on(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).write_bytes(bytes(8))
    survivor, victim = outcomes_of(killed, 2, tmp_path)
    assert victim.exit_code == -signal.SIGKILL
    assert struct.unpack("<q", (tmp_path / "1").read_bytes()) == (10,)
    assert isinstance(survivor.error, PeerError), survivor.trace
    assert survivor.error.step in (10, 11)
    found = run_workers(run, 1, plain, Job({"checkpoint_steps": 4}, tmp_path / "saved"))[0]
    assert found.resumed_at == 8
    last = Counter(sample for _, _, epoch, sample in found.seen if epoch == 2)
    assert last == dict.fromkeys(range(NUM_SAMPLES), 1)
    assert len([each for each in found.seen if each[2] == 1]) == NUM_SAMPLES - 2 * BATCH


def test_options_come_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "parallax.toml"
    file.write_text(
        f"checkpoint_dir = {json.dumps(str(tmp_path / 'saved'))}\n"
        "checkpoint_steps = 4\ncheckpoint_seconds = 9.5\ncheckpoint_keep = 1\n"
    )
    run_workers(run, 1, plain, replace(Job(), options={"config": str(file)}))
    assert names(tmp_path / "saved") == ["step-00000016"]
