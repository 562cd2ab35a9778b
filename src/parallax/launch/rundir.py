"""The private directory through which the processes of one job meet."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Literal

RUN_DIRECTORY = "PARALLAX_RUN_DIRECTORY"
"""The environment variable that tells a child where it is."""

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


@dataclass(frozen=True)
class RunDirectory:
    """Names of the files in it; the launcher makes the directory and removes it."""

    path: str

    def fifo(self, rank: int, stream: Stream) -> str:
        """The named pipe that carries one stream of a worker to the launcher."""
        return os.path.join(self.path, f"worker-{rank}.{stream}")

    def pid(self, rank: int) -> str:
        """The worker's process id, which is also that of its session and process group."""
        return os.path.join(self.path, f"worker-{rank}.pid")

    def failure(self, rank: int) -> str:
        """Why the worker failed, by itself."""
        return os.path.join(self.path, f"worker-{rank}.failure.json")

    @property
    def result(self) -> str:
        """How the workers ended, by the agent."""
        return os.path.join(self.path, "result.json")

    @property
    def agent_log(self) -> str:
        """What the agent and torch's machinery in it printed: shown only if the agent breaks."""
        return os.path.join(self.path, "agent.log")

    @property
    def elastic(self) -> str:
        """torch's own files."""
        return os.path.join(self.path, "elastic")


def write_json(path: str, value: Any) -> None:
    """Write a file that a reader sees either whole or not at all."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(partial, path)


def read_json(path: str) -> Any:
    """The value in the file, or None where there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
