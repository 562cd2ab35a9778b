"""A run that is saved and loaded, at any number of workers, goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import parallax
from parallax.checkpoint import export
from parallax.checkpoint.manifest import FileRecord, Manifest, part_name
from parallax.errors import CheckpointError, OutOfStepError, PeerError
from parallax.tables.rowmap import RowMap
from tests.support.parity import share
from tests.support.workers import outcomes_of, run_workers

NUM_ROWS, WIDTH, BATCH = 23, 4, 12
NUM_STEPS, SAVED_AT = 6, 3


class Model(nn.Module):
    """A table in the way that `form` names, one with fewer rows than workers, a dense layer."""

    def __init__(self, form: str = "embedding") -> None:
        super().__init__()
        self.form = form
        self.few = nn.Embedding(3, WIDTH, sparse=form == "sparse")
        self.out = nn.Linear(WIDTH, 1)
        if form == "bare":
            self.weight = nn.Parameter(torch.randn(NUM_ROWS, WIDTH))
        else:
            self.table = nn.Embedding(NUM_ROWS, WIDTH, sparse=form == "sparse")
        if form == "tied":
            self.back = nn.Linear(WIDTH, NUM_ROWS, bias=False)
            self.back.weight = self.table.weight
        if form == "norm":
            self.norm = nn.BatchNorm1d(WIDTH)
            self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        rows = self.weight[ids] if self.form == "bare" else self.table(ids)
        hidden = rows + self.few(ids % 3)
        if self.form == "norm":
            hidden = self.norm(hidden)
        loss = (torch.tanh(self.out(hidden)).squeeze(-1) - targets).pow(2).mean()
        if self.form == "tied":
            loss = loss + F.cross_entropy(self.back(hidden), ids)
        return loss


def _dense_and_tables(model: Model) -> list[Optimizer]:
    tables = [*model.table.parameters(), *model.few.parameters()]
    return [
        torch.optim.SparseAdam(tables, lr=0.02),
        torch.optim.Adam(model.out.parameters(), lr=0.02),
    ]


def _momentum(model: Model) -> list[Optimizer]:
    groups = [
        {"params": [*model.table.parameters(), *model.few.parameters()], "momentum": 0.5},
        {"params": model.out.parameters()},
    ]
    return [torch.optim.SGD(groups, lr=0.1, momentum=0.9)]


Make = Callable[[Model], list[Optimizer]]
CASES: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "adagrad": ("embedding", lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)], {}),
    "sparse-adam": ("sparse", _dense_and_tables, {}),
    "lazy-adam": (
        "embedding",
        lambda m: [torch.optim.Adam(m.parameters(), lr=0.02, amsgrad=True)],
        {"lazy": True},
    ),
    "lazy-nadam": (
        "embedding",
        lambda m: [torch.optim.NAdam(m.parameters(), lr=0.02)],
        {"lazy": ["table.*"]},
    ),
    "momentum": ("embedding", _momentum, {}),
    "observed": ("bare", lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)], {}),
    "tied": ("tied", lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)], {}),
}


@contextlib.contextmanager
def session_of(
    case: str, *, seed: int = 7
) -> Iterator[tuple[parallax.Session, Model, list[Optimizer]]]:
    form, make, options = CASES[case]
    torch.manual_seed(seed)
    model = Model(form).double()
    optimizers = make(model)
    with parallax.parallelize(model, optimizers, timeout_seconds=60, **options) as session:
        yield session, model, optimizers


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(BATCH, generator=generator) ** 2 * NUM_ROWS).long()
    return ids, torch.randn(BATCH, generator=generator, dtype=torch.float64)


def backward(session: parallax.Session, model: nn.Module, step: int) -> None:
    ids, targets = share(batch_of(step), session.rank, session.num_workers, None)
    session.weight(len(ids))
    model(ids, targets).backward()


def train(
    session: parallax.Session, model: nn.Module, optimizers: list[Optimizer], *steps: int
) -> None:
    for step in steps:
        backward(session, model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train_and_save(case: str, path: Path, saved_at: int) -> dict[str, Tensor]:
    """A worker of the run that is not interrupted."""
    with session_of(case) as (session, model, optimizers):
        train(session, model, optimizers, *range(saved_at))
        session.save(path)
        train(session, model, optimizers, *range(saved_at, NUM_STEPS))
        return session.state_dict()


def load_and_train(case: str, path: Path, saved_at: int) -> dict[str, Tensor]:
    """A worker of the run that goes on, in a session that knows nothing of the other."""
    with session_of(case, seed=99) as (session, model, optimizers):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 7
        if case != "observed":
            train(session, model, optimizers, 100)  # leaves state that must go
        session.load(path)
        assert session.step == saved_at
        train(session, model, optimizers, *range(saved_at, NUM_STEPS))
        assert session.step == NUM_STEPS
        return session.state_dict()


def each(function: Callable[..., dict[str, Tensor]], calls: list[tuple[Any, ...]]) -> list[Any]:
    """A worker that does many things, one after the other: starting it takes the longest."""
    return [function(*arguments) for arguments in calls]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


# Going on ---------------------------------------------------------------------------------


Run = tuple[str, int, int, int]
RUNS: list[Run] = [
    (case, saved_at, then, now)
    for case, saved_at, pairs in [
        ("adagrad", SAVED_AT, "12 13 14 21 22 23 24 31 34 43"),
        ("sparse-adam", SAVED_AT, "13 21 23 34"),
        ("lazy-adam", SAVED_AT, "12 14 23 32 41"),
        ("lazy-nadam", SAVED_AT, "13 32"),
        ("momentum", SAVED_AT, "12 21 23"),
        ("observed", SAVED_AT, "12 21 23 31 42"),
        ("tied", SAVED_AT, "12 21 23"),
        ("lazy-adam", 0, "12 21 23"),
        ("observed", 0, "12 21 23"),
    ]
    for then, now in (map(int, pair) for pair in pairs.split())
]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Run, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The parameters at the end of each run that was loaded, and of the one it goes on from."""
    folder = tmp_path_factory.mktemp("runs")
    expected, found = {}, {}
    for then in (1, 2, 3, 4):
        saves = sorted({(case, saved_at) for case, saved_at, num, _ in RUNS if num == then})
        calls = [(case, folder / f"{case}-{saved_at}-{then}", saved_at) for case, saved_at in saves]
        ends = run_workers(each, then, train_and_save, calls)[0]
        expected.update({(*save, then): end for save, end in zip(saves, ends, strict=True)})
    for now in (1, 2, 3, 4):
        loads = [run for run in RUNS if run[3] == now]
        calls = [(case, folder / f"{case}-{at}-{then}", at) for case, at, then, _ in loads]
        ends = run_workers(each, now, load_and_train, calls)[0]
        found.update(dict(zip(loads, ends, strict=True)))
    return {run: (found[run], expected[run[:3]]) for run in RUNS}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "{}-at-{}-from-{}-to-{}".format(*run))
def test_a_run_goes_on_at_another_number_of_workers(
    run: Run, runs: dict[Run, tuple[dict[str, Tensor], dict[str, Tensor]]]
) -> None:
    assert_same(*runs[run])


# Where the rows are -----------------------------------------------------------------------


def save_untrained(path: Path) -> None:
    with session_of("lazy-adam") as (session, _, _):
        session.save(path)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_the_manifest_says_where_the_rows_are_and_an_export_has_them_by_id(
    num_workers: int, tmp_path: Path
) -> None:
    run_workers(save_untrained, num_workers, tmp_path / "saved")
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert manifest["tables"].keys() == {"table.weight", "few.weight"}
    for name, num_rows in (("table.weight", NUM_ROWS), ("few.weight", 3)):
        row_map = RowMap.even(num_rows, num_workers)
        assert manifest["tables"][name] == {
            "num_rows": num_rows,
            "boundaries": list(row_map.boundaries),
            # One worker's shard stands for the parameter's memory.
            "multiplier": row_map.multiplier if num_workers > 1 else 1,
        }
    export(tmp_path / "saved", tmp_path / "model.pt")
    torch.manual_seed(7)
    expected = Model().double().state_dict()
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


OTHER_MAPS = {
    "table.weight": RowMap(NUM_ROWS, (0, 20, NUM_ROWS), multiplier=5),
    "few.weight": RowMap(3, (0, 0, 3), multiplier=2),
}


def _move_rows(path: Path, maps: dict[str, RowMap]) -> None:
    """Place the rows of a checkpoint, and the optimizer's state of them, by other maps."""
    manifest = Manifest.read(path)
    names = [part_name(rank, manifest.num_workers) for rank in range(manifest.num_workers)]
    parts = [torch.load(_folder(path) / name, weights_only=True) for name in names]
    for table, then in manifest.tables.items():
        for lines in [[p["rows"] for p in parts], [p["state"][table] for p in parts]]:
            for key in [table] if table in lines[0] else list(lines[0]):
                whole = then.whole(torch.cat([line[key] for line in lines]))
                for rank, line in enumerate(lines):
                    line[key] = maps[table].part(whole, rank)
    replace(manifest, tables=maps).write(path)
    for name, part in zip(names, parts, strict=True):
        buffer = io.BytesIO()
        torch.save(part, buffer)
        _replace(path, name, buffer.getvalue())


def test_a_checkpoint_with_other_row_maps_is_read_by_them(tmp_path: Path) -> None:
    """A release may choose other multipliers, and shards of other sizes."""
    saved, moved = tmp_path / "saved", tmp_path / "moved"
    expected = run_workers(train_and_save, 2, "lazy-adam", saved, SAVED_AT)[0]
    shutil.copytree(saved, moved)
    _move_rows(moved, OTHER_MAPS)
    assert Manifest.read(moved).tables == OTHER_MAPS
    for num_workers in (1, 2, 3):
        ends = run_workers(load_and_train, num_workers, "lazy-adam", moved, SAVED_AT)
        assert_same(ends[0], expected)
    for path in (saved, moved):
        export(path, path / "model.pt")
    one, other = (torch.load(path / "model.pt", weights_only=True) for path in (saved, moved))
    for name, value in one.items():
        assert torch.equal(other[name], value), name


# Going on with all else -------------------------------------------------------------------


def scheduled(path: Path, steps: range, loads: bool) -> list[float]:
    with session_of("momentum") as (session, model, optimizers):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], gamma=0.5)
        if loads:
            session.load(path)
        for step in steps:
            train(session, model, optimizers, step)
            scheduler.step()
        if not loads:
            # As schedulers with numpy in their formula do.
            optimizers[0].param_groups[0]["weight_decay"] = numpy.float64(0.25)
            session.save(path)
        group = optimizers[0].param_groups[0]
        return [group["lr"], group["momentum"], group["weight_decay"]]


def test_hyper_parameters_are_restored(tmp_path: Path) -> None:
    assert run_workers(scheduled, 2, tmp_path, range(3), False)[0] == [0.0125, 0.5, 0.25]
    assert run_workers(scheduled, 3, tmp_path, range(3, 4), True)[2] == [0.00625, 0.5, 0.25]


def buffers_of(path: Path, loads: bool) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(7 + loads)
    model = Model("norm").double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with parallax.parallelize(model, optimizer) as session:
        if loads:
            session.load(path)
        else:
            train(session, model, [optimizer], 0, 1)
            model.scratch.fill_(5.0)
            session.save(path)
        return {n: b.clone() for n, b in model.named_buffers()}, model.norm.weight.detach().clone()


def test_buffers_are_restored_on_every_worker(tmp_path: Path) -> None:
    (expected, weight), _ = run_workers(buffers_of, 2, tmp_path, False)
    assert expected["norm.num_batches_tracked"] == 2
    assert expected["scratch"].tolist() == [5.0, 5.0]
    for found, found_weight in run_workers(buffers_of, 3, tmp_path, True):
        assert_same(found, expected)
        assert torch.equal(found_weight, weight)


def state_after(path: Path, unsynced: int, synced: int) -> dict[str, Tensor]:
    with session_of("adagrad") as (session, model, optimizers):
        train(session, model, optimizers, 0)
        session.save(path)
        for _ in range(synced):
            backward(session, model, 1)
        with session.no_sync():
            for _ in range(unsynced):
                backward(session, model, 2)
        session.load(path)
        assert all(parameter.grad is None for parameter in model.parameters())
        train(session, model, optimizers, 4)
        return session.state_dict()


def test_gradients_that_wait_do_not_survive_a_load(tmp_path: Path) -> None:
    calls = [(tmp_path, unsynced, synced) for unsynced in (0, 1) for synced in (0, 1)]
    expected, *found = run_workers(each, 2, state_after, calls)[0]
    for state in found:
        assert_same(state, expected)


# Random numbers and data ------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), numpy.random.rand()


def draw_after_saving(path: Path) -> tuple[float, float, float]:
    with session_of("adagrad") as (session, _, _):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(session.rank + 20)
        draw()
        session.save(path)
        return draw()


def draw_after_loading(path: Path) -> tuple[float, float, float]:
    with session_of("adagrad") as (session, _, _):
        session.load(path)
        return draw()


def test_each_worker_goes_on_in_its_own_random_sequence(tmp_path: Path) -> None:
    expected = run_workers(draw_after_saving, 2, tmp_path)
    assert run_workers(draw_after_loading, 2, tmp_path) == expected
    more = run_workers(draw_after_loading, 4, tmp_path)
    assert more[:2] == expected
    assert all(len({numbers[kind] for numbers in more}) == 4 for kind in range(3))


def read_some(
    path: Path, num_steps: int, loads: str, options: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Samples seen before the save or after the load, and those of the epoch after."""
    with session_of("adagrad", seed=3) as (session, _, _):
        loader = DataLoader(range(29), batch_size=2, shuffle=options.get("shuffle", False))
        if loads == "before":
            session.load(path)
        sharded = session.shard(loader, split=options.get("split", False))
        if loads == "after":
            session.load(path)
        seen = []
        for step, batch in enumerate(sharded):
            seen += batch.tolist()
            if not loads and step + 1 == num_steps:
                session.save(path)
                break
        after = [sample for batch in sharded for sample in batch.tolist()] if loads else []
        return seen, after


READS: list[tuple[str, dict[str, Any]]] = [
    ("before", {"shuffle": True}),
    ("after", {"shuffle": True}),
    ("after", {"shuffle": True, "split": True}),
    ("before", {}),
]


def test_data_go_on_without_losing_or_doubling_a_sample(tmp_path: Path) -> None:
    paths = [tmp_path / str(index) for index in range(len(READS))]
    begin = [(path, 3, "", options) for path, (_, options) in zip(paths, READS, strict=True)]
    go_on = [(path, 0, *read) for path, read in zip(paths, READS, strict=True)]
    before = run_workers(each, 2, read_some, begin)
    now = run_workers(each, 3, read_some, go_on)
    for index in range(len(READS)):
        parts = [worker[index] for worker in (*before, *now)]
        assert sorted(sample for seen, _ in parts for sample in seen) == list(range(29))
        assert sorted(sample for _, after in parts for sample in after) == list(range(29))


# The folder -------------------------------------------------------------------------------


def save_twice(path: str, cwd: Path) -> list[list[str]]:
    os.chdir(cwd)
    listings = []
    with session_of("adagrad") as (session, model, optimizers):
        for step in (0, 1, 1):
            train(session, model, optimizers, *range(step))
            session.save(path)
            session.state_dict()  # all have returned from save
            listings.append(sorted(os.listdir(path)))
            session.state_dict()
        expected = session.state_dict()
        session.load(path)
        found = session.state_dict()
    if found:
        assert_same(found, expected)
    return listings


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "a b" / "step-backups").mkdir(parents=True)
    listings = run_workers(save_twice, 2, "a b", tmp_path)[0]
    for listing in listings:
        assert len(listing) == 3
        assert {"manifest.json", "step-backups"} < set(listing)
    folders = [name for listing in listings for name in listing if name.startswith("step-0")]
    assert [name[:13] for name in folders] == ["step-00000000", "step-00000001", "step-00000002"]


def refused_saves(file: Path, foreign: Path, own: Path) -> list[str]:
    found = []
    with session_of("adagrad") as (session, model, optimizers):
        for path in (file, file / "below", foreign, own / str(session.rank)):
            with pytest.raises(CheckpointError) as caught:
                session.save(path)
            found.append(str(caught.value))
        train(session, model, optimizers, 0)  # and training goes on
    return found


def test_saves_that_cannot_be_are_refused_on_every_worker(tmp_path: Path) -> None:
    file, foreign = tmp_path / "file", tmp_path / "foreign"
    file.write_text("mine")
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"name": "something else"}')
    for messages in run_workers(refused_saves, 2, file, foreign, tmp_path / "own"):
        assert "file" in messages[0]
        assert "file" in messages[1]
        assert "not a checkpoint of Parallax" in messages[2]
        assert "same folder on every worker" in messages[3]
    assert file.read_text() == "mine"
    assert [entry.name for entry in foreign.iterdir()] == ["manifest.json"]
    assert "something else" in (foreign / "manifest.json").read_text()


def save_on_rank_0(path: Path) -> str:
    with session_of("adagrad") as (session, model, _):
        with pytest.raises(OutOfStepError) as caught:
            if session.rank == 0:
                session.save(path)
            else:
                model(*batch_of(0))
        return str(caught.value)


def test_a_save_on_one_worker_alone_is_an_error_on_all(tmp_path: Path) -> None:
    for message in run_workers(save_on_rank_0, 2, tmp_path):
        assert "saving a checkpoint" in message
        assert "lookup" in message


# Crashes ----------------------------------------------------------------------------------


def fill_the_disk(path: Path, victim: int) -> tuple[str, list[str]]:
    with session_of("adagrad") as (session, model, optimizers):
        train(session, model, optimizers, *range(SAVED_AT))
        session.save(path)
        train(session, model, optimizers, SAVED_AT)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if session.rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
        with pytest.raises(CheckpointError) as caught:
            session.save(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        session.state_dict()
        left = sorted(os.listdir(path))
        session.load(path)
        assert session.step == SAVED_AT
        session.save(path)
        return str(caught.value), left


@pytest.mark.parametrize("victim", [0, 1])
def test_a_failed_write_leaves_the_checkpoint_before(victim: int, tmp_path: Path) -> None:
    for message, left in run_workers(fill_the_disk, 2, tmp_path, victim):
        assert "File too large" in message
        assert left[0] == "manifest.json"
        assert len(left) == 2
        assert left[1].startswith("step-00000003")


def die_while_saving(path: Path, victim: int, moment: str) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_half_and_die(content: Any, file: Any, **_: object) -> None:
        file.write(b"half")
        file.flush()
        die()

    with session_of("adagrad") as (session, model, optimizers):
        train(session, model, optimizers, *range(SAVED_AT))
        session.save(path)
        expected = session.state_dict()
        if session.rank == 0:
            torch.save(expected, path.parent / "expected.pt")
        train(session, model, optimizers, SAVED_AT)
        if session.rank == victim and moment == "part":
            torch.save = write_half_and_die
        elif session.rank == victim:
            os.replace = die
        session.save(path)


def load_and_save(path: Path) -> tuple[dict[str, Tensor], int, list[str]]:
    with session_of("adagrad", seed=99) as (session, _, _):
        session.load(path)
        state = session.state_dict()
        session.save(path)
        session.state_dict()
        return state, session.step, sorted(os.listdir(path))


@pytest.mark.parametrize(("victim", "moment"), [(1, "part"), (0, "part"), (0, "manifest")])
def test_a_killed_worker_leaves_the_checkpoint_before(
    victim: int, moment: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    outcomes = outcomes_of(die_while_saving, 2, path, victim, moment)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    survivor = outcomes[1 - victim]
    assert isinstance(survivor.error, PeerError), survivor.trace
    assert survivor.seconds < 30
    assert len(list(path.glob("step-*"))) == 2
    state, step, left = run_workers(load_and_save, 3, path)[0]
    assert step == SAVED_AT
    assert_same(state, torch.load(tmp_path / "expected.pt"))
    assert left[0] == "manifest.json"
    assert len(left) == 2


# Damage -----------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def _folder(path: Path) -> Path:
    return path / json.loads((path / "manifest.json").read_text())["folder"]


def _flip(file: Path, place: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 0x10
    file.write_bytes(bytes(data))


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _replace(path: Path, name: str, data: bytes) -> None:
    """Another file in place of one, with a manifest that vouches for it."""
    (_folder(path) / name).write_bytes(data)
    manifest = Manifest.read(path)
    files = {**manifest.files, name: FileRecord(len(data), zlib.crc32(data))}
    replace(manifest, files=files).write(path)


def _evil(path: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"parameters": Evil(path.parent / "touched")}, buffer)
    return buffer.getvalue()


def _edit(path: Path, **fields: object) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def _set_maps(path: Path, maps: dict[str, RowMap]) -> None:
    """With a checksum that is right."""
    replace(Manifest.read(path), tables=maps).write(path)


def _remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


PART = "part-00001-of-00002.pt"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "holds no checkpoint"),
    "no manifest": (_remove_manifest, "holds no checkpoint"),
    "manifest truncated": (lambda p: _truncate(p / "manifest.json"), "manifest.json' is damaged"),
    "manifest empty": (lambda p: (p / "manifest.json").write_text(""), "manifest.json' is damaged"),
    "manifest binary": (
        lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        "manifest.json' is damaged",
    ),
    "manifest foreign": (lambda p: (p / "manifest.json").write_text("[1]"), "not a checkpoint of"),
    "manifest of another": (lambda p: _edit(p, format="other"), "not a checkpoint of Parallax"),
    "version": (lambda p: _edit(p, version=99), "version 99"),
    "step changed": (lambda p: _edit(p, step=4), "manifest.json was changed"),
    "fields missing": (lambda p: _edit(p, files=None), "manifest.json was changed"),
    "row maps missing": (lambda p: _edit(p, tables=None), "does not say where the rows"),
    "row map missing": (
        lambda p: _set_maps(p, {"few.weight": Manifest.read(p).tables["few.weight"]}),
        "only one of manifest.json and the parts has the table 'table.weight'",
    ),
    "row map of other parts": (
        lambda p: _set_maps(p, OTHER_MAPS),
        "part 0 has 2 rows of 'few.weight' instead of the 0 in manifest.json",
    ),
    "no files": (lambda p: shutil.rmtree(_folder(p)), "is missing"),
    **{
        f"{name} {how}": (lambda p, n=name, d=damage: d(_folder(p) / n), f"{name} {says}")
        for name in ("dense.pt", "part-00000-of-00002.pt", PART)
        for how, damage, says in [
            ("missing", Path.unlink, "is missing"),
            ("truncated", _truncate, "has "),
            ("longer", lambda f: f.write_bytes(f.read_bytes() + b"x"), "has "),
        ]
    },
    **{
        f"{name} flipped at {place}": (
            lambda p, n=name, at=place: _flip(_folder(p) / n, at),
            f"the content of {name} was changed",
        )
        for name in ("dense.pt", PART)
        for place in (0.05, 0.5, 0.95)
    },
    "evil dense": (lambda p: _replace(p, "dense.pt", _evil(p)), "dense.pt holds other things than"),
    "evil part": (lambda p: _replace(p, PART, _evil(p)), f"{PART} holds other things than"),
    "evil pickle": (
        lambda p: _replace(p, "dense.pt", pickle.dumps(Evil(p.parent / "touched"))),
        "dense.pt cannot be read",
    ),
    "garbage": (lambda p: _replace(p, "dense.pt", b"garbage"), "dense.pt cannot be read"),
}


def fingerprint(session: parallax.Session, optimizers: list[Optimizer]) -> bytes:
    """Everything of this worker that a load may change."""
    from parallax.checkpoint.writer import _dense, _part

    contents = session._training.state.contents()
    state = {"dense": _dense(contents), "part": _part(contents), "step": session.step}
    return pickle.dumps(torch.utils._pytree.tree_map_only(Tensor, Tensor.tolist, state))


def load_damaged(paths: list[Path]) -> list[tuple[str, bool]]:
    found = []
    with session_of("lazy-adam", seed=99) as (session, model, optimizers):
        loader = session.shard(DataLoader(range(10), batch_size=1))
        next(iter(loader))
        train(session, model, optimizers, 50, 51)
        before = fingerprint(session, optimizers)
        for path in paths:
            with pytest.raises(CheckpointError) as caught:
                session.load(path)
            found.append((str(caught.value), fingerprint(session, optimizers) == before))
    return found


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, bool]]]:
    """What each worker says of each damaged checkpoint, and whether it stayed as it was."""
    folder = tmp_path_factory.mktemp("damaged")
    run_workers(train_and_save, 2, "lazy-adam", folder / "whole", SAVED_AT)
    paths = []
    for index, (damage, _) in enumerate(DAMAGES.values()):
        paths.append(folder / f"{index:02d}")
        shutil.copytree(folder / "whole", paths[-1])
        damage(paths[-1])
    found = run_workers(load_damaged, 3, paths)
    assert not (folder / "touched").exists(), "code from a checkpoint was run"
    return {name: [worker[i] for worker in found] for i, name in enumerate(DAMAGES)}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    name: str, damaged: dict[str, list[tuple[str, bool]]]
) -> None:
    _, expected = DAMAGES[name]
    for message, unchanged in damaged[name]:
        assert expected in message
        assert unchanged


# Another model ----------------------------------------------------------------------------


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS + 1, WIDTH)


class Renamed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.another = nn.Linear(2, 2)


def _adagrad(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def _grouped(model: Model) -> list[Optimizer]:
    rest = [p for p in model.parameters() if p is not model.out.bias]
    return [torch.optim.Adagrad([{"params": rest}, {"params": [model.out.bias]}], lr=0.1)]


OTHERS: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "shape": (
        lambda: Wider().double(),
        _adagrad,
        "'table.weight' is (23, 4) torch.float64 there and (24, 4) torch.float64 here",
    ),
    "dtype": (Model, _adagrad, "torch.float64 there and (3, 4) torch.float32 here"),
    "names": (lambda: Renamed().double(), _adagrad, "only the model has the parameters ['another."),
    "buffers": (
        lambda: Model("norm").double(),
        _adagrad,
        "only the model has the parameters ['norm",
    ),
    "optimizer": (
        lambda: Model().double(),
        lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)],
        "the checkpoint's optimizers are Adagrad, the session's are SGD",
    ),
    "groups": (lambda: Model().double(), _grouped, "the groups of Adagrad have other parameters"),
    "loader": (lambda: Model().double(), _adagrad, "in the midst of 10 samples"),
}


def save_with_loader(path: Path) -> None:
    with session_of("adagrad") as (session, model, optimizers):
        batches = iter(session.shard(DataLoader(range(10), batch_size=1, shuffle=True)))
        next(batches)
        train(session, model, optimizers, 0)
        session.save(path)


def load_into_others(path: Path) -> list[tuple[str, bool]]:
    found = []
    for make_model, make_optimizers, _ in OTHERS.values():
        model = make_model()
        optimizers = make_optimizers(model)
        with parallax.parallelize(model, optimizers) as session:
            loader = session.shard(DataLoader(range(11), batch_size=1, shuffle=True))
            assert loader.epoch == 0
            before = fingerprint(session, optimizers)
            with pytest.raises(CheckpointError) as caught:
                session.load(path)
            found.append((str(caught.value), fingerprint(session, optimizers) == before))
    return found


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run_workers(save_with_loader, 2, tmp_path)
    for worker in run_workers(load_into_others, 2, tmp_path):
        for (message, unchanged), (_, _, expected) in zip(worker, OTHERS.values(), strict=True):
            assert expected in message
            assert unchanged, message


# Memory -----------------------------------------------------------------------------------

BIG_ROWS, BIG_WIDTH = 200_000, 64
BIG_BYTES = BIG_ROWS * BIG_WIDTH * 4


def _own_bytes() -> int:
    """Memory of this process that is not a file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@contextlib.contextmanager
def peak_of(found: dict[str, int], name: str) -> Iterator[None]:
    """How much own memory grew at most inside."""
    over = threading.Event()
    start = _own_bytes()
    found[name] = 0

    def sample() -> None:
        while not over.is_set():
            found[name] = max(found[name], _own_bytes() - start)
            time.sleep(0.001)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def save_big(path: Path, loads: bool) -> dict[str, int]:
    with torch.device("meta"):
        model = nn.Embedding(BIG_ROWS, BIG_WIDTH)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    peaks: dict[str, int] = {}
    with parallax.parallelize(model, optimizer) as session:
        if loads:
            sums = optimizer.state[model.weight]["sum"]
            with peak_of(peaks, "load"):
                session.load(path)
            # The allocator may keep what is freed, so new tensors could need memory twice.
            assert optimizer.state[model.weight]["sum"] is sums
        with peak_of(peaks, "save"):
            session.save(path)
    return peaks


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_no_worker_holds_a_whole_table(tmp_path: Path) -> None:
    run_workers(save_big, 2, tmp_path, False)
    parts = sorted(tmp_path.glob("*/part-*.pt"))
    assert [part.stat().st_size / BIG_BYTES for part in parts] == [
        pytest.approx(1, abs=0.01),  # half of the rows, and of their state
        pytest.approx(1, abs=0.01),
    ]
    assert next(tmp_path.glob("*/dense.pt")).stat().st_size < 10_000
    for peaks in run_workers(save_big, 4, tmp_path, True):
        assert peaks["save"] < 0.1 * BIG_BYTES
        assert peaks["load"] < 0.1 * BIG_BYTES
