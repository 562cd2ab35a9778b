"""Crews of workers that do as they are told or not, without any training."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import crew as crew_module
from benchmarks.contest import WARM_UP_STEPS, Setting, hold
from benchmarks.crew import Crew, CrewError
from benchmarks.engines import ENGINES, Engine
from benchmarks.loopback import Loopback, Seat
from benchmarks.testbed import Counters

WORKER = """#!{python}
import json, os, sys, time

manner, steps = sys.argv[3], 0
folder = os.path.dirname(sys.argv[0])

def state(pid):
    # T if it is stopped; a process that was told so may need a moment.
    for _ in range(100):
        with open(f"/proc/{{pid}}/stat") as stat:
            found = stat.read().rpartition(")")[2].split()[0]
        if found == "T":
            break
        time.sleep(0.01)
    return found

def note_states():
    with open(f"{{folder}}/pids") as pids, open(f"{{folder}}/turns", "a") as turns:
        others = [int(pid) for pid in pids if int(pid) != os.getpid()]
        print(json.dumps([os.getpid(), [state(pid) for pid in others]]), file=turns)

with open(f"{{folder}}/pids", "a") as pids:
    print(os.getpid(), file=pids)
if manner == "fails":
    print(json.dumps({{"error": "no way"}}), flush=True)
    time.sleep(600)
print(json.dumps({{"versions": {{"pid": str(os.getpid())}}}}), flush=True)
for line in sys.stdin:
    steps += json.loads(line)["steps"]
    if manner == "dies":
        sys.exit(3)
    if manner == "hangs":
        time.sleep(600)
    if manner == "notes":
        note_states()
    if manner == "babbles":
        print("hello", flush=True)
    answer = {{"seconds": 1.0, "cpu_seconds": 0.5, "loss": steps, "spans": {{"forward": 0.1}}}}
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Actor(Engine):
    program: str = ""

    @property
    def python(self) -> Path:
        return Path(self.program)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "worker"
    path.write_text(WORKER.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def is_running(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}")


def make(program: str, manner: str, tmp_path: Path, bed: Loopback | None = None) -> Crew:
    return Crew(bed or Loopback(2), Actor("Actor", manner, program=program), {}, tmp_path / "logs")


def test_another_checkout_runs_its_own_sources(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "worker.py").write_text(
        "import json, os; versions = {'path': os.environ['PYTHONPATH'], 'pid': str(os.getpid())}\n"
        "print(json.dumps({'versions': versions}), flush=True); input()"
    )
    engine = ENGINES[f"parallax@{tmp_path}"]
    assert engine.missing is None
    with Crew(Loopback(1), engine, {}, tmp_path / "logs") as crew:
        crew.start(1)
    assert crew.versions["path"] == f"{tmp_path}{os.pathsep}{tmp_path / 'src'}"
    with pytest.raises(KeyError, match="parallax-nothing"):
        ENGINES["parallax-nothing"]


def test_a_crew_ends_with_its_block_and_can_be_closed_again(program: str, tmp_path: Path) -> None:
    with make(program, "works", tmp_path) as crew:
        crew.start(1)
        assert is_running(crew.versions["pid"])
        assert crew.take_turn(3).loss == 3
    assert not is_running(crew.versions["pid"])
    crew.close()


@pytest.mark.parametrize(
    ("manner", "message"),
    [("dies", "see .*actor-[01].log: it ended"), ("babbles", "it answered 'he")],
)
def test_a_worker_that_fails_in_its_turn_ends_the_crew(
    program: str, tmp_path: Path, manner: str, message: str
) -> None:
    crew = make(program, manner, tmp_path)
    crew.start(1)
    with pytest.raises(CrewError, match=message):
        crew.take_turn(1)
    assert not is_running(crew.versions["pid"])


def test_a_worker_that_dies_between_turns_is_named(program: str, tmp_path: Path) -> None:
    crew = make(program, "works", tmp_path)
    crew.start(1)
    crew.take_turn(1)
    os.kill(int(crew.versions["pid"]), 9)
    os.waitid(os.P_PID, int(crew.versions["pid"]), os.WEXITED | os.WNOWAIT)
    with pytest.raises(CrewError, match="Actor on worker0, see .*actor-0.log: it ended"):
        crew.take_turn(1)


def test_a_turn_that_takes_too_long_ends_the_crew(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "TURN_SECONDS", 0.1)
    crew = make(program, "hangs", tmp_path)
    crew.start(1)
    with pytest.raises(CrewError, match="no answer from worker0, worker1 in 0.1 s"):
        crew.take_turn(1)
    assert not is_running(crew.versions["pid"])


def test_a_crew_that_cannot_start_leaves_nothing_behind(program: str, tmp_path: Path) -> None:
    crew = make(program, "fails", tmp_path)
    started = []
    popen = crew._popen
    crew._popen = lambda *args: started.append(popen(*args)) or started[-1]  # type: ignore
    with pytest.raises(CrewError, match="no way"):
        crew.start(1)
    assert len(started) == 2
    assert not any(is_running(str(worker.pid)) for worker in started)
    with pytest.raises(CrewError, match="nowhere"):
        make("nowhere", "works", tmp_path).start(1)


class Busy(Loopback):
    """Its links go on after the workers have answered."""

    reads = 0

    def counters(self, host: Seat) -> Counters:
        self.reads += 1
        return Counters(min(self.reads, 20) * 100_000, 0)


def test_a_turn_has_the_bytes_that_were_on_their_way_when_it_ended(
    program: str, tmp_path: Path
) -> None:
    with make(program, "works", tmp_path, Busy(1)) as crew:
        crew.start(1)
        turn = crew.take_turn(2)
    assert turn.sent_bytes == (2_000_000 - 100_000) / 2
    assert turn.seconds > 1.0  # The workers say 1.0.


def test_all_engines_have_the_loss_of_the_same_step_and_those_that_fail_are_named(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.contest.LOGS", tmp_path)
    manners = {"parallax": "works", "one": "works", "two": "fails", "three": "dies"}
    for name, manner in manners.items():
        monkeypatch.setitem(ENGINES, name, Actor(name, manner, program=program))
    setting = Setting("sparsity-2", 2, None, False, tuple(manners), 3, left_out={"four": "no time"})
    results = {each.engine: each for one in hold(setting, lambda _: None).sittings for each in one}
    assert results["parallax"].loss == results["one"].loss == WARM_UP_STEPS
    assert [turn.loss for turn in results["one"].turns] == [
        WARM_UP_STEPS + 2 * n for n in (2, 3, 4)
    ]
    assert "no way" in str(results["two"].absent)
    assert "sparsity-2-2xloopback-real/three-" in str(results["three"].absent)
    assert results["four"].absent == "no time"


def test_engines_take_turns_and_are_stopped_in_those_of_others(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.contest.LOGS", tmp_path)
    for name in ("parallax", "one", "two"):
        monkeypatch.setitem(ENGINES, name, Actor(name, "notes", program=program))
    setting = Setting("sparsity-2", 1, None, False, ("parallax", "one", "two"), 3)
    (sitting,) = hold(setting, lambda _: None).sittings
    pids = [int(each.versions["pid"]) for each in sitting]
    turns = [json.loads(line) for line in (tmp_path / "turns").read_text().splitlines()]
    assert [pid for pid, _ in turns[-12:]] == 4 * pids  # A round that nobody counts, and three.
    assert all(states == ["T", "T"] for _, states in turns)


def test_parallax_may_not_fail(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.contest.LOGS", tmp_path)
    monkeypatch.setitem(ENGINES, "parallax", Actor("Parallax", "dies", program=program))
    with pytest.raises(CrewError, match="Parallax on worker"):
        hold(Setting("sparsity-2", 2, None, False, ("parallax",)), lambda _: None)


def test_workers_of_one_machine_share_its_counters_and_have_no_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "head\n  lo: 900 1 0 0 0 0 0 0 1200 1 0\n eth0: 1 1 0 0 0 0 0 0 1 1 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    with Loopback(3) as bed:
        assert [seat.name for seat in bed.hosts] == ["worker0", "worker1", "worker2"]
        assert bed.counters(bed.hosts[0]) == Counters(400, 300)
        with pytest.raises(ValueError, match="rate='1gbit'"):
            bed.shape(bed.hosts[0], "1gbit")
