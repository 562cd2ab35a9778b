"""Lines that a kill cannot corrupt."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.observability.journal import NAME, Journal, last_run, read


def kinds(folder: Path) -> list[str]:
    return [event["kind"] for event in read(folder)]


def test_lines_are_added_and_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a" / "run")
    journal.write("start", hosts=("a", "b"), rate=float("inf"), nested={"nan": [float("nan"), 1.5]})
    journal.write("plan", step=3)
    journal.close()
    journal.write("nothing")  # a closed one is as if it had no folder
    start, plan = read(tmp_path / "a" / "run")
    assert start["hosts"] == ["a", "b"]
    assert start["rate"] is None
    assert start["nested"] == {"nan": [None, 1.5]}
    assert plan["step"] == 3


def test_without_a_folder_nothing_happens() -> None:
    journal = Journal(None)
    journal.write("start")
    assert not journal.is_open


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_torn_line_is_left_out_and_the_next_run_begins_anew(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path)
    journal.write("start")
    journal.write("steps", number=5)
    journal.close()
    path = tmp_path / NAME
    os.truncate(path, path.stat().st_size - cut)
    assert kinds(tmp_path) == (["start", "steps"] if cut == 1 else ["start"])
    journal = Journal(tmp_path)
    journal.write("start")
    journal.close()
    assert kinds(tmp_path)[-1] == "start"
    assert kinds(tmp_path)[0] == "start"
    assert len(last_run(read(tmp_path))) == 1


@pytest.mark.parametrize("written", [OSError(28, "No space left on device"), 5])
def test_a_full_disk_ends_the_journal_and_not_the_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    written: OSError | int,
) -> None:
    journal = Journal(tmp_path)
    journal.write("start")

    def full(file: int, text: bytes) -> int:
        if isinstance(written, OSError):
            raise written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        journal.write("steps", number=5)
    assert not journal.is_open
    journal.write("plan")
    assert kinds(tmp_path) == ["start"]
    assert "nothing more is written to Config.run_dir" in caplog.text
    assert str(tmp_path) in caplog.text


def test_foreign_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('[1]\n{"kind": 3}\n\n{"kind": "plan"}\nnot json\n')
    assert kinds(tmp_path) == ["plan"]


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Config.run_dir: cannot write"):
        Journal(tmp_path / "file")
    with pytest.raises(ConfigError, match="A run's folder is what its script gave"):
        read(tmp_path / "nowhere")


def test_lines_are_whole_json(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("plan", why="a\nb “c”")
    journal.close()
    (line,) = (tmp_path / NAME).read_text().splitlines()
    assert json.loads(line)["why"] == "a\nb “c”"
