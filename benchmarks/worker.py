"""One worker of an engine: gets ready, then takes turns when it is told to.

    python -m benchmarks.worker ddp '{"workload": "lm", "is_emulated": true, …}'

Lines of JSON on standard input and output: it says that it is ready and with which versions; for
every `{"steps": 8}` it trains, and answers with what that took. It ends when its input does. What
an engine prints goes to standard error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from typing import Any

from benchmarks.engines.task import Task, Trainer


def main(engine: str, about: str) -> None:
    say = _take_output()
    try:
        packages, facts = _parse(about)
        task = Task.from_environment(**facts)
        turn = importlib.import_module(f"benchmarks.engines.{engine}").start(task)
        say({"versions": _versions(packages)})
        for line in sys.stdin:
            say(_timed(task, turn, json.loads(line)["steps"]))
    except BaseException as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
    finally:
        # Engines may wait for each other as they end, and some did end already.
        sys.stderr.flush()
        os._exit(0)


def _versions(packages: list[str]) -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {**versions, "python": platform.python_version()}


def _timed(task: Task, turn: Trainer, num_steps: int) -> dict[str, Any]:
    task.seconds.clear()
    start, cpu = time.perf_counter(), time.process_time()
    loss = turn(num_steps)
    return {
        "seconds": (time.perf_counter() - start) / num_steps,
        "cpu_seconds": (time.process_time() - cpu) / num_steps,
        "spans": {name: spent / num_steps for name, spent in task.seconds.items()},
        "loss": loss,
    }


def _take_output() -> Any:
    """Keeps standard output for the answers; whoever prints, prints to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    return say


def _parse(about: str) -> tuple[list[str], dict[str, Any]]:
    facts = json.loads(about)
    return facts.pop("packages"), facts


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
