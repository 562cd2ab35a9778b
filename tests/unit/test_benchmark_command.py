"""`python -m benchmarks`: its words, and what it makes of results that are there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import suite
from benchmarks.contest import Contest, Result, Setting
from benchmarks.crew import CrewError, Turn
from benchmarks.goals import GOALS
from benchmarks.results import Results


def held(setting: Setting) -> Contest:
    turns = [Turn(0.1, 0.1, 1e6, 1e6, 1.0, {})] * setting.repetitions
    return Contest(setting, [[Result("parallax", {}, 2, turns)]], "today", "here")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "cnn"], "workload 'cnn' is none of"),
        (["run", "text"], "python -m benchmarks converge"),
        (["run", "text-x"], "workload 'text-x' is none of"),
        (["run", "lm", "--rate", "fast"], "rate='fast'"),
        (["run", "lm", "--hosts", "0"], "'0' is no number from 1 to 250"),
        (["run", "lm", "--hosts", "251"], "'251' is no number from 1 to 250"),
        (["run", "lm", "--repetitions", "0"], "'0' is no number from 1"),
        (["run", "lm", "--turn-seconds", "nan"], "'nan' is no number above 0"),
        (["run", "lm", "--engines", "mxnet"], "'mxnet' is none of"),
        (["run", "lm", "--engines", "parallax@nowhere"], "nowhere is no checkout of Parallax"),
        (["run", "lm", "--engines", "ddp@."], "'ddp@.' is none of"),
        (["converge", "--hosts", "two"], "'two' is no number"),
        (["profile", "cnn"], "workload 'cnn' is none of"),
        (["report", "no-such-folder"], "has no results"),
    ],
)
def test_wrong_words_are_explained(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments = command.parse_args(words)
        arguments.act(arguments)
    assert message in f"{ended.value}{capsys.readouterr().err}"


def test_results_are_in_the_order_of_the_suite_and_others_after_them(tmp_path: Path) -> None:
    first, second = suite.full()[3], suite.full()[9]
    other = dataclasses.replace(first, num_hosts=3)
    for setting in (other, second, first):
        held(setting).save(tmp_path / f"{setting.name}.json")
    found = Results.load(tmp_path)
    assert [each.setting for each in found.contests] == [first, second, other]
    assert found == Results(found.contests)


def test_every_setting_of_the_suite_has_or_explains_every_peer() -> None:
    peers = {"ddp-sparse", "ddp-dense", "horovod", "torchrec", "deepspeed", "tensorflow"}
    for setting in (*suite.full(), *suite.quick()):
        assert setting.repetitions >= 5
        assert not set(setting.engines) & set(setting.left_out)
        assert peers <= {*setting.engines, *setting.left_out}, setting.name
        assert setting.engines[0] == "parallax"
        assert "alone" in setting.engines
        assert all(setting.left_out.values())


def test_the_suite_measures_every_goal() -> None:
    engines = {setting.name: {*setting.engines, "limit", "formula"} for setting in suite.full()}
    assert len(engines) == len(suite.full())
    for goal in GOALS:
        assert {goal.against, goal.engine} <= engines[goal.setting] | set(engines)


def test_what_takes_too_long_says_how_long() -> None:
    by_name = {setting.name: setting for setting in suite.full()}
    assert "ddp-dense" in by_name["lm-2x200mbit-emulated"].engines
    why = by_name["lm-8x200mbit-emulated"].left_out["ddp-dense"]
    assert why == "its step takes 29 s on the wire alone"
    assert "24 processes" in by_name["lm-8x200mbit-emulated"].left_out["tensorflow"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that were held; those of `nmt` fail."""
    names: list[str] = []

    def hold(setting: Setting, _: object) -> Contest:
        names.append(setting.workload)
        if setting.workload == "nmt":
            raise CrewError("Parallax on a: it ended")
        return held(setting)

    settings = [Setting(name, 2, None, True, ("parallax",)) for name in ("lm", "nmt", "dlrm")]
    monkeypatch.setattr(command, "hold", hold)
    monkeypatch.setattr(suite, "full", lambda: settings)
    return names


def run_suite(folder: Path, *words: str) -> None:
    arguments = command.parse_args(["suite", "--out", str(folder), *words])
    arguments.act(arguments)


def test_a_setting_that_fails_is_named_and_the_others_are_measured(
    tmp_path: Path, measured: list[str]
) -> None:
    with pytest.raises(SystemExit, match="nmt-2xloopback-emulated failed: Parallax on a: it ended"):
        run_suite(tmp_path)
    assert measured == ["lm", "nmt", "dlrm"]
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["dlrm", "lm"]


def test_what_is_kept_is_not_measured_again_but_if_asked_or_changed(
    tmp_path: Path, measured: list[str]
) -> None:
    kept, _, changed = suite.full()
    held(kept).save(tmp_path / f"{kept.name}.json")
    held(dataclasses.replace(changed, repetitions=9)).save(tmp_path / f"{changed.name}.json")
    with pytest.raises(SystemExit):
        run_suite(tmp_path)
    assert measured == ["nmt", "dlrm"]
    measured.clear()
    with pytest.raises(SystemExit):
        run_suite(tmp_path, "--fresh")
    assert measured == ["lm", "nmt", "dlrm"]


def test_a_setting_in_which_an_engine_failed_is_measured_again(
    tmp_path: Path, measured: list[str]
) -> None:
    first, _, last = suite.full()
    whole, broken = held(first), held(last)
    ours = Result("parallax")
    # One never took part, the other failed in its turn.
    whole.sittings = [[ours], [Result("horovod", absent="not installed")]]
    broken.sittings = [[ours, Result("horovod", absent="it ended")]]
    assert (whole.failed, broken.failed) == ([], ["horovod"])
    whole.save(tmp_path / f"{first.name}.json")
    broken.save(tmp_path / f"{last.name}.json")
    with pytest.raises(SystemExit):
        run_suite(tmp_path)
    assert measured == ["nmt", "dlrm"]
