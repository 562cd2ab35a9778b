"""Engines that train the same workload on the same hosts, in turns: A B C A B C …

Every engine's workers are up at the same time, and stopped while another takes its turn, so a slow
minute of the machine slows all of them, and no process of an engine runs in another's turn; what it
left on the links has arrived before it is stopped. Links get their rate when all are ready: what
happens before the first step is not what is compared. Engines whose memory does not suffice
together sit at several tables (`sittings`), Parallax at each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.crew import LOGS, ROOT, Crew, CrewError, Turn
from benchmarks.engines import ALONE, ENGINES, OURS, Engine
from benchmarks.loopback import Loopback
from benchmarks.origin import Theft, commit, machine, now
from benchmarks.testbed import Testbed
from benchmarks.workloads import Workload, by_name
from parallax.planning.memory import available_bytes

WARM_UP_STEPS = 4
"""After which losses are compared; Parallax prefetches from the third step on."""
MAX_STEPS = 100
"""Of a turn."""
SLOW_STEP_SECONDS = 4.0
"""A turn has one step of an engine that is slower than this, two at least of others."""
FIRST_PORT = 29_500
SLOW_START = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
PROCESS_BYTES = 350e6
"""Of a worker before it has a model."""
MEMORY_PART = 0.9
"""Of what is free; estimates are not exact, and the machine needs some itself."""


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
    """How long a turn should be, if steps are not longer. See SLOW_STEP_SECONDS."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Engines that do not take part, and why."""

    @property
    def name(self) -> str:
        compute = "emulated" if self.is_emulated else "real"
        return f"{self.workload}-{self.num_hosts}x{self.rate or 'loopback'}-{compute}"

    @property
    def title(self) -> str:
        compute = "emulated accelerator" if self.is_emulated else "real compute"
        where = f"hosts × {self.rate}" if self.rate else "workers on one machine"
        return f"{self.workload}, {self.num_hosts} {where}, {compute}"

    def hosts(self) -> Testbed | Loopback:
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
    loss: float | None = None
    """After the same steps in every engine: those of the warm-up."""


@dataclass
class Contest:
    """All results of a setting, one list for each sitting."""

    setting: Setting
    sittings: list[list[Result]]
    started: str
    machine: str
    stolen: float = 0.0
    """The share of the processors' time that others on the same hardware had."""

    @property
    def failed(self) -> list[str]:
        """Engines that had a place and gave it up; others never sat beside Parallax."""
        return [
            each.engine
            for sitting in self.sittings
            if any(one.engine == OURS for one in sitting)
            for each in sitting
            if each.absent is not None
        ]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Contest:
        facts = json.loads(path.read_text())
        facts["setting"]["engines"] = tuple(facts["setting"]["engines"])
        sittings = [[_result(**each) for each in sitting] for sitting in facts["sittings"]]
        return cls(**{**facts, "setting": Setting(**facts["setting"]), "sittings": sittings})


def _result(turns: list[dict[str, Any]], **facts: Any) -> Result:
    return Result(turns=[Turn(**turn) for turn in turns], **facts)


def hold(setting: Setting, progress: Callable[[str], None]) -> Contest:
    """Bring up hosts and engines, let them take their turns, and take all down."""
    started, theft = now(), Theft()
    workload, free = by_name(setting.workload), available_bytes()
    reasons = {**setting.left_out, **_reasons(setting, workload, free)}
    absent = [Result(name, absent=why) for name, why in reasons.items()]
    present = [name for name in setting.engines if name not in reasons]
    sittings = [
        _sit(setting, names, progress)
        for names in sittings_of(present, workload, setting.num_hosts, free)
    ]
    held = [*sittings, absent] if absent else sittings
    return Contest(setting, held, started, machine(), theft.share())


def _reasons(setting: Setting, workload: Workload, free_bytes: float) -> dict[str, str]:
    """Why engines of the setting cannot take part here."""
    missing = {name: ENGINES[name].missing for name in setting.engines}
    large = too_large(list(setting.engines), workload, setting.num_hosts, free_bytes)
    return {**large, **{name: why for name, why in missing.items() if why is not None}}


def too_large(
    engines: list[str], workload: Workload, num_hosts: int, free_bytes: float
) -> dict[str, str]:
    """Engines for which memory does not suffice even without the other peers."""
    ours = _needed_bytes(ENGINES[OURS], workload, num_hosts)
    needed = {name: ours + _needed_bytes(ENGINES[name], workload, num_hosts) for name in engines}
    return {
        name: f"needs {size / 1e9:.0f} GB beside Parallax, {free_bytes / 1e9:.0f} are free"
        for name, size in needed.items()
        if name != OURS and size > MEMORY_PART * free_bytes
    }


def sittings_of(
    engines: list[str], workload: Workload, num_hosts: int, free_bytes: float
) -> list[list[str]]:
    """Engines by turns that fit into memory together; Parallax is in each, `alone` in the first."""
    needed = {name: _needed_bytes(ENGINES[name], workload, num_hosts) for name in engines}
    budget = MEMORY_PART * free_bytes - needed[OURS]
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
    processes = num_hosts * engine.num_processes
    return copies * times * workload.table_bytes + processes * PROCESS_BYTES


def _sit(setting: Setting, names: list[str], progress: Callable[[str], None]) -> list[Result]:
    results = [Result(name) for name in names]
    about = {"workload": setting.workload, "is_emulated": setting.is_emulated}
    with ExitStack() as stack:
        bed = setting.hosts()
        stack.enter_context(bed)
        crews: dict[str, Crew] = {}
        for place, result in enumerate(results):  # One after the other: starting takes memory.
            progress(f"{setting.name}: starting {ENGINES[result.engine].title}")
            crew = Crew(bed, ENGINES[result.engine], about, LOGS / setting.name)
            crews[result.engine] = stack.enter_context(crew)
            with _absent_if_failing(result):
                crew.start(FIRST_PORT + place)
                result.versions = crew.versions
                if result.engine == OURS or crew.engine.root is not None:
                    result.versions["parallax"] = commit(crew.engine.root or ROOT)
        if setting.rate is not None:
            set_links(bed, setting.rate)
        progress(f"{setting.name}: warming up")
        _rehearse(setting, results, crews)
        for repetition in range(setting.repetitions):
            progress(f"{setting.name}: turn {repetition + 1} of {setting.repetitions}")
            for result in _taking_part(results):
                with _absent_if_failing(result):
                    result.turns.append(crews[result.engine].take_turn(result.num_steps))
    return results


def set_links(bed: Any, rate: str) -> None:
    for host in bed.hosts:
        # Or connections would start slowly after every pause, which only turns bring about.
        bed.run(["sh", "-c", f"echo 0 > {SLOW_START}"], host).check_returncode()
        bed.shape(host, rate)


def _rehearse(setting: Setting, results: list[Result], crews: dict[str, Crew]) -> None:
    """A few steps, which lay things out, then a whole round of turns that nobody counts."""
    for result in _taking_part(results):
        with _absent_if_failing(result):
            crews[result.engine].take_turn(1)
            turn = crews[result.engine].take_turn(WARM_UP_STEPS - 1)
            result.loss = turn.loss
            result.num_steps = _num_steps(setting, turn)
            settle(crews[result.engine], by_name(setting.workload))
    for result in _taking_part(results):
        with _absent_if_failing(result):
            turn = crews[result.engine].take_turn(result.num_steps)
            result.num_steps = _num_steps(setting, turn)


def settle(crew: Crew, workload: Workload) -> None:
    """Let an engine that finds its way with tables do so."""
    if workload.tables and crew.engine.settling_steps:
        crew.take_turn(crew.engine.settling_steps)


def _num_steps(setting: Setting, turn: Turn) -> int:
    least = 1 if turn.seconds > SLOW_STEP_SECONDS else 2
    return min(max(round(setting.turn_seconds / turn.seconds), least), MAX_STEPS)


def _taking_part(results: list[Result]) -> Iterator[Result]:
    return (result for result in results if result.absent is None)


@contextmanager
def _absent_if_failing(result: Result) -> Iterator[None]:
    """An engine that fails is named as such, and the others go on; Parallax may not fail."""
    try:
        yield
    except CrewError as error:
        if result.engine == OURS:
            raise
        result.absent = str(error)
