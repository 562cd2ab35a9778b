"""An engine's workers on several hosts, which take turns together."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.engines import Engine
from benchmarks.loopback import Loopback
from benchmarks.testbed import Counters, Testbed

START_SECONDS = 600.0
TURN_SECONDS = 900.0
QUIET_SECONDS = 0.02
QUIET_BYTES = 64 << 10
"""Less than this in that time is no message of a step; some engines ask each other all the time."""
SETTLE_SECONDS = 2.0
"""After which an engine that never falls silent is stopped all the same."""
ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "runs" / "logs"


class CrewError(Exception):
    """A worker failed, or did not answer in time."""


@dataclass
class Turn:
    """What one turn took; seconds and bytes are those of a step."""

    seconds: float
    """Of the slowest worker, and until what it left on its way has arrived."""
    cpu_seconds: float
    """Of a worker, on average."""
    sent_bytes: float
    received_bytes: float
    """Of the host with the most, headers included."""
    loss: float
    """The workers' mean."""
    spans: dict[str, float] = field(default_factory=dict)
    """Parts of the step as the first worker saw them."""


class Crew:
    """Processes of one engine, one a host. They are stopped but in their own turns.

    Whatever fails, the crew is closed before the error is seen: nobody else pays for its leftovers.
    """

    def __init__(
        self, bed: Testbed | Loopback, engine: Engine, about: dict[str, Any], logs: Path = LOGS
    ) -> None:
        self.engine = engine
        self.versions: dict[str, str] = {}
        self._bed = bed
        self._about = {**about, "options": engine.options, "packages": engine.packages}
        self._logs = logs
        self._root = engine.root or ROOT
        self._workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, port: int) -> None:
        """Until all workers are ready, and stopped."""
        with self._closed_if_failing():
            self._logs.mkdir(parents=True, exist_ok=True)
            for rank, host in enumerate(self._bed.hosts):
                self._workers.append(self._popen(host, rank, port))
            self.versions = self._answers(START_SECONDS)[0]["versions"]
            self._signal(signal.SIGSTOP)

    def take_turn(self, num_steps: int) -> Turn:
        with self._closed_if_failing():
            self._signal(signal.SIGCONT)
            before = self._counters()
            for rank, worker in enumerate(self._workers):
                self._tell(rank, worker, {"steps": num_steps})
            answers = self._answers(TURN_SECONDS)
            late_seconds = self._settle()
            after = self._counters()
            self._signal(signal.SIGSTOP)
        moved = [
            [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
        ]
        sent, received = (max(side) / num_steps for side in zip(*moved, strict=True))
        return Turn(
            seconds=max(answer["seconds"] for answer in answers) + late_seconds / num_steps,
            cpu_seconds=_mean(answers, "cpu_seconds"),
            sent_bytes=sent,
            received_bytes=received,
            loss=_mean(answers, "loss"),
            spans=answers[0]["spans"],
        )

    def close(self) -> None:
        """Again and again does nothing."""
        self._signal(signal.SIGKILL)
        for worker in self._workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # What it did not read cannot be written.
                    pipe.close()
        self._workers.clear()

    @contextlib.contextmanager
    def _closed_if_failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise CrewError(f"{self.engine.title}: {error}") from error
            raise

    def _counters(self) -> list[Counters]:
        return [self._bed.counters(host) for host in self._bed.hosts]  # type: ignore[arg-type]

    def _settle(self) -> float:
        """Waits until the links are quiet; the seconds until they were.

        An engine may have sent ahead for a step that it has not begun. In the next engine's turn
        that would go on, from the kernel's buffers, and nobody would have paid for it.
        """
        start = quiet = time.monotonic()
        seen = self._counters()
        while time.monotonic() < min(quiet + QUIET_SECONDS, start + SETTLE_SECONDS):
            time.sleep(QUIET_SECONDS / 10)
            counters = self._counters()
            if _most_moved(seen, counters) > QUIET_BYTES:
                quiet, seen = time.monotonic(), counters
        return quiet - start

    def _popen(self, host: Any, rank: int, port: int) -> subprocess.Popen[str]:
        engine = self.engine
        about = json.dumps(self._about)
        command = [str(engine.python), "-m", "benchmarks.worker", engine.module, about]
        with self.log(rank).open("w") as log:
            return self._bed.popen(
                command,
                host,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._root,
                env={**os.environ, **self._environment(rank, port)},
                start_new_session=True,  # A group, so that its children are stopped with it.
            )

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun would set, one thread each, and the interface for gloo."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._bed.hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self._bed.hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": self._bed.interface,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{self._root}{os.pathsep}{self._root / 'src'}",
            "BENCHMARK_HOSTS": ",".join(host.address for host in self._bed.hosts),
            "PATH": f"{self.engine.python.parent}{os.pathsep}{os.environ['PATH']}",
        }

    def log(self, rank: int) -> Path:
        title = self.engine.title.replace(" ", "-").lower()
        return self._logs / f"{title}-{rank}.log"

    def _answers(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """One line from each worker. The first that fails is told of, not who waits for it."""
        deadline = time.monotonic() + timeout_seconds
        waiting = {_output(worker): rank for rank, worker in enumerate(self._workers)}
        answers: dict[int, dict[str, Any]] = {}
        while waiting:
            ready = select.select(list(waiting), [], [], max(deadline - time.monotonic(), 0))[0]
            if not ready:
                names = ", ".join(self._bed.hosts[rank].name for rank in waiting.values())
                raise CrewError(
                    f"{self.engine.title}: no answer from {names} in {timeout_seconds:g} s"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)
                answers[rank] = self._parse(pipe.readline(), rank)
        return [answers[rank] for rank in sorted(answers)]

    def _parse(self, line: str, rank: int) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        except ValueError:
            answer = {"error": f"it answered {line!r}"}
        if "error" in answer:
            raise self._error(rank, answer["error"])
        return answer

    def _tell(self, rank: int, worker: subprocess.Popen[str], message: dict[str, Any]) -> None:
        assert worker.stdin is not None
        try:
            worker.stdin.write(json.dumps(message) + "\n")
            worker.stdin.flush()
        except BrokenPipeError:
            raise self._error(rank, "it ended between turns") from None

    def _error(self, rank: int, what: str) -> CrewError:
        where = f"{self._bed.hosts[rank].name}, see {os.path.relpath(self.log(rank), ROOT)}"
        return CrewError(f"{self.engine.title} on {where}: {what.strip().splitlines()[0]}")

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.returncode is None:  # Not reaped, so the number is still its own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, number)


def _most_moved(before: list[Counters], after: list[Counters]) -> int:
    """Bytes of the host with the most, in either direction."""
    pairs = zip(before, after, strict=True)
    return max(max(b - a for a, b in zip(*pair, strict=True)) for pair in pairs)


def _output(worker: subprocess.Popen[str]) -> IO[str]:
    assert worker.stdout is not None
    return worker.stdout


def _mean(answers: list[dict[str, Any]], name: str) -> float:
    return float(sum(answer[name] for answer in answers) / len(answers))
