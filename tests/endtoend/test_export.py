"""`parallax export`: what N workers have saved, the original script loads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import parallax
from parallax.checkpoint import export
from parallax.errors import CheckpointError, ConfigError
from tests.support.workers import run_workers


class Model(nn.Module):
    """Sharded, observed, dense and tied parameters; buffers that are saved and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.bare = nn.Parameter(torch.randn(11, 4))
        self.into = nn.Embedding(11, 4)
        self.back = nn.Linear(4, 11, bias=False)
        self.back.weight = self.into.weight
        self.norm = nn.BatchNorm1d(4)
        self.turned = nn.Parameter(torch.randn(2, 4).T)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("same_shift", self.shift)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.table(ids) + self.bare[ids] + self.into(ids) + self.shift)
        return self.back(hidden).pow(2).mean() + (hidden @ self.turned).mean()


def train_and_save(path: Path) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with parallax.parallelize(model, optimizer) as session:
        for step in range(3):
            model(torch.arange(6) + session.rank + step).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.shift.add_(3)
        session.save(path)
        return session.state_dict()


Saved = tuple[Path, dict[str, Tensor]]


@pytest.fixture(scope="module", params=[1, 3])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("export") / "check point"
    return path, run_workers(train_and_save, request.param, path)[0]


def run_export(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallax.launch.command", "export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return safetensors.torch.load_file(file)
    state: dict[str, Tensor] = torch.load(file, weights_only=True)
    return state


def assert_loads(file: Path, expected: dict[str, Tensor]) -> None:
    state = read(file)
    assert set(state) == set(expected)
    assert {"into.weight", "back.weight", "shift", "same_shift"} < set(state)
    assert "scratch" not in state
    model = Model()
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert torch.equal(state["back.weight"], state["into.weight"])


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_the_original_model_loads_what_the_function_writes(
    saved: Saved, suffix: str, tmp_path: Path
) -> None:
    path, expected = saved
    out = tmp_path / f"model{suffix}"
    out.write_text("an older one")
    written = export(path, out)
    assert written.num_tensors == len(expected)
    assert written.size_bytes == out.stat().st_size
    assert list(tmp_path.iterdir()) == [out]
    assert_loads(out, expected)


@pytest.mark.parametrize("saved", [3], indirect=True)
def test_tied_weights_take_their_room_once(saved: Saved, tmp_path: Path) -> None:
    path, _ = saved
    export(path, tmp_path / "model.pt")
    state = read(tmp_path / "model.pt")
    assert state["into.weight"].data_ptr() == state["back.weight"].data_ptr()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_original_model_loads_what_the_command_writes(
    saved: Saved, suffix: str, tmp_path: Path
) -> None:
    path, expected = saved
    out = tmp_path / f"model{suffix}"
    done = run_export(path, out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}: {len(expected)} tensors, {out.stat().st_size} bytes\n"
    assert_loads(out, expected)


@pytest.mark.parametrize("saved", [3], indirect=True)
def test_the_command_refuses_in_one_line(saved: Saved, tmp_path: Path) -> None:
    path, _ = saved
    for arguments, says in [
        ((tmp_path, tmp_path / "m.pt"), "holds no checkpoint"),
        ((path, tmp_path / "nowhere" / "m.pt"), "No such file or directory"),
        ((path, tmp_path / "m.txt"), "must end with"),
    ]:
        done = run_export(*arguments)
        assert done.returncode != 0
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("saved", [3], indirect=True)
def test_a_damaged_checkpoint_is_not_exported(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path / "copy")
    part = next((tmp_path / "copy").glob("*/dense.pt"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(bytes(data))
    (tmp_path / "model.pt").write_text("an older one")
    with pytest.raises(CheckpointError, match=r"the content of dense\.pt was changed"):
        export(tmp_path / "copy", tmp_path / "model.pt")
    assert (tmp_path / "model.pt").read_text() == "an older one"
    with pytest.raises(ConfigError, match="must end in"):
        export(saved[0], tmp_path / "model.bin")
