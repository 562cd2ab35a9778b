"""The private directory through which the processes of a job meet on one host."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import Any, Literal

RUN_DIRECTORY = "PARALLAX_RUN_DIRECTORY"
"""The environment variable that tells a child where it is."""

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")

_STEP = struct.Struct("<q")
_NO_STEP = -1


@dataclass(frozen=True)
class RunDirectory:
    """Names of the files in it; the host process makes the directory and removes it."""

    path: str

    def fifo(self, local_rank: int, stream: Stream) -> str:
        """The named pipe that carries one stream of a worker to the host process."""
        return self._file(local_rank, stream)

    def pid(self, local_rank: int) -> str:
        """The worker's process id, which is also that of its session and process group."""
        return self._file(local_rank, "pid")

    def failure(self, local_rank: int) -> str:
        """Why the worker failed, by itself."""
        return self._file(local_rank, "failure.json")

    def step(self, local_rank: int) -> str:
        """How many steps the worker has taken, by its session."""
        return self._file(local_rank, "step")

    @property
    def agent_spec(self) -> str:
        """What the agent is to do."""
        return os.path.join(self.path, "agent.json")

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

    def make_step(self, local_rank: int) -> None:
        """Make the file of the worker's steps."""
        with open(self.step(local_rank), "wb") as file:
            file.write(_STEP.pack(_NO_STEP))

    def read_step(self, local_rank: int) -> int | None:
        """The worker's steps so far; None before it has called `parallelize`."""
        try:
            with open(self.step(local_rank), "rb") as file:
                (step,) = _STEP.unpack(file.read(_STEP.size))
        except (FileNotFoundError, struct.error):
            return None
        return None if step == _NO_STEP else int(step)

    def _file(self, local_rank: int, kind: str) -> str:
        return os.path.join(self.path, f"worker-{local_rank}.{kind}")


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
