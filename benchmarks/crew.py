"""An engine's workers on several hosts, which take turns together."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines import Engine
from benchmarks.loopback import Loopback
from benchmarks.testbed import Testbed

START_SECONDS = 600.0
TURN_SECONDS = 900.0
ROOT = Path(__file__).resolve().parents[1]


class CrewError(Exception):
    """A worker failed, or did not answer in time."""


@dataclass
class Turn:
    """What one turn took; seconds and bytes are those of a step."""

    seconds: float
    """Of the slowest worker."""
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
    """Processes of one engine, one a host. They are stopped but in their own turns."""

    def __init__(
        self, bed: Testbed | Loopback, engine: Engine, about: dict[str, Any], port: int
    ) -> None:
        self.engine = engine
        self.versions: dict[str, str] = {}
        self._bed = bed
        self._logs = ROOT / "runs" / "logs"
        self._workers = [
            self._popen(host, rank, about, port) for rank, host in enumerate(bed.hosts)
        ]

    def wait_ready(self) -> None:
        self.versions = self._answers(START_SECONDS)[0]["versions"]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def take_turn(self, num_steps: int) -> Turn:
        self._signal(signal.SIGCONT)
        try:
            before = [self._bed.counters(host) for host in self._bed.hosts]
            for worker in self._workers:
                _write(worker, {"steps": num_steps})
            answers = self._answers(TURN_SECONDS)
            after = [self._bed.counters(host) for host in self._bed.hosts]
        finally:
            self.pause()
        moved = [
            [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
        ]
        sent, received = (max(side) / num_steps for side in zip(*moved, strict=True))
        return Turn(
            seconds=max(answer["seconds"] for answer in answers),
            cpu_seconds=_mean(answers, "cpu_seconds"),
            sent_bytes=sent,
            received_bytes=received,
            loss=_mean(answers, "loss"),
            spans=answers[0]["spans"],
        )

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        for worker in self._workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                pipe.close()

    def _popen(
        self, host: Any, rank: int, about: dict[str, Any], port: int
    ) -> subprocess.Popen[str]:
        engine = self.engine
        facts = {**about, "options": engine.options, "packages": engine.packages}
        command = [str(engine.python), "-m", "benchmarks.worker", engine.module, json.dumps(facts)]
        self._logs.mkdir(parents=True, exist_ok=True)
        with self.log(rank).open("w") as log:
            return self._bed.popen(
                command,
                host,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, **self._environment(rank, port)},
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
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
            "BENCHMARK_HOSTS": ",".join(host.address for host in self._bed.hosts),
            "PATH": f"{self.engine.python.parent}{os.pathsep}{os.environ['PATH']}",
        }

    def log(self, rank: int) -> Path:
        title = self.engine.title.replace(" ", "-").lower()
        return self._logs / f"{title}-{rank}.log"

    def _answers(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """One line from each worker. The first that fails is told of, not who waits for it."""
        deadline = time.monotonic() + timeout_seconds
        waiting = {worker.stdout: rank for rank, worker in enumerate(self._workers)}
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
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            where = f"{self._bed.hosts[rank].name}, see {self.log(rank).relative_to(ROOT)}"
            raise CrewError(f"{self.engine.title} on {where}: {answer['error']}")
        return answer

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                _signal_group(worker.pid, number)


def _signal_group(pid: int, number: signal.Signals) -> None:
    for send in (os.killpg, os.kill):  # before it made its own group there is only itself
        try:
            return send(pid, number)
        except ProcessLookupError:
            continue


def _mean(answers: list[dict[str, Any]], name: str) -> float:
    return float(sum(answer[name] for answer in answers) / len(answers))


def _write(worker: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(message) + "\n")
    worker.stdin.flush()
