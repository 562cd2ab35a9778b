"""Engines that train the same workload on the same hosts, in turns: A B C A B C …

Every engine's workers are up at the same time, and stopped while another takes its turn, so a slow
minute of the machine slows all of them, and nothing of an engine runs in another's turn. Links get
their rate when all are ready: what happens before the first step is not what is compared. Engines
whose memory does not suffice together sit at several tables (`sittings`), Parallax at each.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.crew import Crew, CrewError, Turn
from benchmarks.engines import ALONE, ENGINES, OURS, Engine
from benchmarks.loopback import Loopback
from benchmarks.testbed import Testbed
from benchmarks.workloads import Workload, by_name

WARM_UP_STEPS = 3
FIRST_PORT = 29_500
PROCESS_BYTES = 350e6
"""Of a worker before it has a model."""


@dataclass(frozen=True)
class Setting:
    """What is compared where."""

    workload: str
    num_hosts: int
    rate: str | None
    """Of every link; None: the workers of one machine, without any."""
    is_emulated: bool
    engines: tuple[str, ...]
    repetitions: int = 5
    turn_seconds: float = 2.0
    """How long a turn should be; never less than two steps."""

    @property
    def name(self) -> str:
        compute = "emulated" if self.is_emulated else "real"
        return f"{self.workload}-{self.num_hosts}x{self.rate or 'loopback'}-{compute}"

    @property
    def title(self) -> str:
        compute = "emulated accelerator" if self.is_emulated else "real compute"
        where = f"hosts × {self.rate}" if self.rate else "workers on one machine"
        return f"{self.workload}, {self.num_hosts} {where}, {compute}"

    def hosts(self) -> Any:
        """Not yet up, and without their rate."""
        if self.rate is None:
            return Loopback(self.num_hosts)
        return Testbed(self.num_hosts, ssh="off")

    @property
    def num_samples(self) -> int:
        """Of all workers in a step."""
        return by_name(self.workload).samples[0] * self.num_hosts


@dataclass
class Result:
    """The turns of one engine in one sitting."""

    engine: str
    versions: dict[str, str] = field(default_factory=dict)
    num_steps: int = 0
    """Of a turn."""
    turns: list[Turn] = field(default_factory=list)
    absent: str | None = None
    """Why there are none."""


@dataclass
class Contest:
    """All results of a setting, one list for each sitting."""

    setting: Setting
    sittings: list[list[Result]]
    started: str
    machine: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Contest:
        facts = json.loads(path.read_text())
        facts["setting"]["engines"] = tuple(facts["setting"]["engines"])
        sittings = [[_result(**each) for each in sitting] for sitting in facts["sittings"]]
        return cls(Setting(**facts["setting"]), sittings, facts["started"], facts["machine"])


def _result(turns: list[dict[str, Any]], **facts: Any) -> Result:
    return Result(turns=[Turn(**turn) for turn in turns], **facts)


def hold(setting: Setting, progress: Callable[[str], None]) -> Contest:
    """Bring up hosts and engines, let them take their turns, and take all down."""
    started = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    absent = [Result(name, absent=ENGINES[name].missing) for name in setting.engines]
    absent = [result for result in absent if result.absent]
    present = [name for name in setting.engines if ENGINES[name].missing is None]
    workload = by_name(setting.workload)
    sittings = [
        _sit(setting, names, progress)
        for names in sittings_of(present, workload, setting.num_hosts, _available_bytes())
    ]
    return Contest(setting, [*sittings, absent] if absent else sittings, started, machine())


def sittings_of(
    engines: list[str], workload: Workload, num_hosts: int, available_bytes: float
) -> list[list[str]]:
    """Engines by turns that fit into memory together; Parallax is in each, `alone` in the first."""
    needed = {name: _needed_bytes(ENGINES[name], workload, num_hosts) for name in engines}
    budget = 0.9 * available_bytes - needed[OURS]
    tables: list[list[str]] = [[]]
    left = budget
    for name in sorted((name for name in engines if name != OURS), key=lambda name: name != ALONE):
        if needed[name] > left and tables[-1]:
            tables.append([])
            left = budget
        tables[-1].append(name)
        left -= needed[name]
    return [[OURS, *others] for others in tables]


def _needed_bytes(engine: Engine, workload: Workload, num_hosts: int) -> float:
    """The tables, Adagrad's state, and a dense gradient's bytes and bucket."""
    copies = num_hosts if engine.replicates else 1
    times = 4 if engine.options.get("sparse") is False else 2
    return copies * times * workload.table_bytes + num_hosts * PROCESS_BYTES


def _sit(setting: Setting, names: list[str], progress: Callable[[str], None]) -> list[Result]:
    results = [Result(name) for name in names]
    about = {"workload": setting.workload, "is_emulated": setting.is_emulated}
    with ExitStack() as stack:
        bed = stack.enter_context(setting.hosts())
        crews: dict[str, Crew] = {}
        for place, result in enumerate(results):  # One after the other: starting takes memory.
            progress(f"{setting.name}: starting {ENGINES[result.engine].title}")
            crew = Crew(bed, ENGINES[result.engine], about, FIRST_PORT + place)
            stack.callback(crew.close)
            with _absent_if_failing(result):
                crew.wait_ready()
                result.versions = crew.versions
                crew.pause()
                crews[result.engine] = crew
        if setting.rate is not None:
            for host in bed.hosts:
                bed.shape(host, setting.rate)
        _take_turns(setting, results, crews, progress)
    return results


def _take_turns(
    setting: Setting,
    results: list[Result],
    crews: dict[str, Crew],
    progress: Callable[[str], None],
) -> None:
    for result in _taking_part(results):
        with _absent_if_failing(result):
            crews[result.engine].take_turn(1)  # The first step lays things out.
            seconds = crews[result.engine].take_turn(WARM_UP_STEPS - 1).seconds
            result.num_steps = min(max(round(setting.turn_seconds / seconds), 2), 100)
    for repetition in range(setting.repetitions):
        progress(f"{setting.name}: turn {repetition + 1} of {setting.repetitions}")
        for result in _taking_part(results):
            with _absent_if_failing(result):
                result.turns.append(crews[result.engine].take_turn(result.num_steps))


def _taking_part(results: list[Result]) -> Iterator[Result]:
    return (result for result in results if result.absent is None)


class _absent_if_failing:
    """An engine that fails is named as such, and the others go on; Parallax may not fail."""

    def __init__(self, result: Result) -> None:
        self._result = result

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, CrewError) or self._result.engine == OURS:
            return False
        self._result.absent = str(error)
        return True


def _available_bytes() -> float:
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"
