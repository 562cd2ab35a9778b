"""Checkpoints in one process: rows between any numbers of owners, plain values, one worker."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import parallax
from parallax.checkpoint.manifest import FileRecord, Manifest
from parallax.checkpoint.plain import plain
from parallax.checkpoint.reader import Saved
from parallax.errors import CheckpointError
from parallax.tables.rowmap import RowMap


@pytest.mark.parametrize("num_then", range(1, 7))
@pytest.mark.parametrize("num_now", range(1, 7))
@pytest.mark.parametrize("num_rows", [1, 5, 60, 61])
def test_rows_go_from_any_owners_to_any_others(num_rows: int, num_now: int, num_then: int) -> None:
    whole = torch.arange(2 * num_rows).reshape(num_rows, 2)
    then, now = RowMap.even(num_rows, num_then), RowMap.even(num_rows, num_now)
    _check_move(whole, then, now)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (RowMap(60, (0, 60), 1), RowMap.even(60, 4)),  # another multiplier
        (RowMap.even(60, 4), RowMap(60, (0, 60), 1)),
        (RowMap(60, (0, 7, 7, 60), 7), RowMap(60, (0, 0, 59, 60), 49)),
        (RowMap(60, (0, 7, 7, 60), 7), RowMap(60, (0, 0, 59, 60), 7)),  # unequal shards
    ],
)
def test_rows_go_from_any_map_to_any_other(
    then: RowMap, now: RowMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallax.checkpoint.reader._BLOCK_ELEMENTS", 10)
    _check_move(torch.arange(120).reshape(60, 2), then, now)


def test_rows_of_a_whole_tensor_go_to_owners() -> None:
    whole, now = torch.arange(120).reshape(60, 2), RowMap.even(60, 4)
    shard = torch.full((now.size_of(1), 2), -1)
    Saved([whole]).copy_part_to(shard, now, 1)
    assert torch.equal(shard, now.part(whole, 1))


def _check_move(whole: Tensor, then: RowMap, now: RowMap) -> None:
    saved = Saved([then.part(whole, owner) for owner in range(then.num_workers)], then)
    assert saved.shape == whole.shape
    assert torch.equal(saved.whole(), whole)
    for owner in range(now.num_workers):
        shard = torch.full((now.size_of(owner), 2), -1)
        saved.copy_part_to(shard, now, owner)
        assert torch.equal(shard, now.part(whole, owner))


class Tag(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (numpy.float64(0.5), 0.5),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(3), 3),
        (numpy.bool_(True), True),
        (numpy.arange(3), [0, 1, 2]),
        (Tag("a"), "a"),
        ((0.9, None), (0.9, None)),
        ({"a": [torch.float32, b"x"]}, {"a": [torch.float32, b"x"]}),
    ],
)
def test_values_become_plain(value: object, expected: object) -> None:
    found = plain(value, "it")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("value", [object(), lambda: 1, {1, 2}, [1, Path()]])
def test_what_could_not_be_read_again_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="option 'x' is a .*only tensors, numbers"):
        plain(value, "option 'x'")


def test_a_manifest_is_read_as_written(tmp_path: Path) -> None:
    tables = {"table": RowMap(10, (0, 3, 10), 7)}
    manifest = Manifest("step-00000003-0", 2, 3, {"dense.pt": FileRecord(5, 7)}, tables)
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    file = tmp_path / "manifest.json"
    for field, value in [("step", 4), ("folder", ".."), ("tables", {}), ("crc32", 0)]:
        changed = {**json.loads(file.read_text()), field: value}
        (tmp_path / field).mkdir()
        (tmp_path / field / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=r"manifest\.json was changed"):
            Manifest.read(tmp_path / field)


TABLE = {"num_rows": 10, "boundaries": [0, 3, 10], "multiplier": 7}


@pytest.mark.parametrize(
    "tables",
    [
        None,
        [],
        {"table": None},
        {"table": {}},
        {"table": {**TABLE, "multiplier": 5}},  # not coprime
        {"table": {**TABLE, "multiplier": 0}},
        {"table": {**TABLE, "multiplier": 17}},
        {"table": {**TABLE, "multiplier": "7"}},
        {"table": {**TABLE, "num_rows": -1}},
        {"table": {**TABLE, "num_rows": 11}},
        {"table": {**TABLE, "boundaries": [0, 11, 10]}},
        {"table": {**TABLE, "boundaries": [0, 3.0, 10]}},
        {"table": {**TABLE, "boundaries": [0, 10]}},  # of one worker
        {"table": {"num_rows": 10, "multiplier": 7}},
    ],
)
def test_a_manifest_without_a_row_map_is_refused(tables: object, tmp_path: Path) -> None:
    """Also with a right checksum."""
    Manifest("step-00000003-0", 2, 3, {}, {}).write(tmp_path)
    file = tmp_path / "manifest.json"
    fields = {**json.loads(file.read_text()), "tables": tables}
    signed = {k: v for k, v in fields.items() if k not in ("format", "version", "crc32")}
    fields["crc32"] = zlib.crc32(json.dumps(signed, sort_keys=True).encode())
    file.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="does not say where the rows of the tables are"):
        Manifest.read(tmp_path)
    file.write_text(json.dumps({k: v for k, v in fields.items() if k != "tables"}))
    with pytest.raises(CheckpointError, match="does not say where the rows of the tables are"):
        Manifest.read(tmp_path)


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path: Path) -> None:
    Manifest("step-00000003-0", 2, 3, {}, {}).write(tmp_path)
    file = tmp_path / "manifest.json"
    fields = {k: v for k, v in json.loads(file.read_text()).items() if k != "tables"}
    file.write_text(json.dumps({**fields, "version": 1}))
    with pytest.raises(CheckpointError, match=r"version 1; this release reads version 2\. Export"):
        Manifest.read(tmp_path)


class Counting(nn.Module):
    """Has state of its own, and one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("same_shift", self.shift)
        self.seen = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += len(ids)
        return ((self.table(ids) + self.shift) * self.scale).pow(2).mean()

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def start(
    optimizer: type[torch.optim.Optimizer], **options: Any
) -> tuple[Counting, torch.optim.Optimizer, parallax.Session]:
    model = Counting()
    made = optimizer(model.parameters(), **options)
    return model, made, parallax.parallelize(model, made)


def step(model: Counting, optimizer: torch.optim.Optimizer, at: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor([at % 10, 3]))
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),  # keeps lists of tensors
    ],
)
def test_one_process_goes_on(optimizer: Any, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, made, session = start(optimizer, **options)
    with session:
        for at in range(3):
            step(model, made, at)
        session.save(tmp_path)
        for at in range(3, 6):
            step(model, made, at)
        expected = session.state_dict()
    model, made, session = start(optimizer, **options)
    with session:
        session.load(tmp_path)
        for at in range(3, 6):
            step(model, made, at)
        found = session.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)
        else:
            assert found[name] == value


def test_what_was_loaded_does_not_hold_on_to_the_files(tmp_path: Path) -> None:
    model, made, session = start(torch.optim.Adam)
    with session:
        step(model, made, 0)
        session.save(tmp_path)
        session.load(tmp_path)
        mapped = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "step-" in line
        ]
        assert not mapped


def test_state_that_could_not_be_read_again_is_refused_when_saving(tmp_path: Path) -> None:
    model, made, session = start(torch.optim.SGD)
    with session:
        session.save(tmp_path)
        before = (tmp_path / "manifest.json").read_text()
        made.state[model.scale]["history"] = object()
        with pytest.raises(CheckpointError, match="'history' in the state of SGD is a object"):
            session.save(tmp_path)
        made.state.clear()
        made.param_groups[0]["rule"] = lambda: 1
        with pytest.raises(CheckpointError, match="option 'rule' of SGD is a function"):
            session.save(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_after_a_step_that_failed(tmp_path: Path) -> None:
    class Failing(torch.optim.Adam):
        fails = False

        def _init_group(self, *args: Any) -> Any:
            if self.fails:
                raise RuntimeError("no")
            return super()._init_group(*args)

    model = Counting()
    optimizer = Failing(model.parameters())
    with parallax.parallelize(model, optimizer, lazy=True) as session:
        step(model, optimizer, 0)
        expected = session.state_dict()
        optimizer.fails = True
        with pytest.raises(RuntimeError, match="no"):
            step(model, optimizer, 1)
        session.save(tmp_path)
        session.load(tmp_path)
        assert torch.equal(session.state_dict()["table.weight"], expected["table.weight"])
