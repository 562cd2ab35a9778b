"""A job: what is to run, and the parts of it that each host and each agent is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from parallax.launch.hosts import Host

Kind = Literal["script", "module"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What every worker runs."""

    kind: Kind
    name: str
    """The path of a script, or the dotted name of a module."""
    arguments: tuple[str, ...] = ()

    def worker_command(self) -> list[str]:
        """What the agent starts, once for each worker."""
        return python("parallax.launch.host.worker", self.kind, self.name, *self.arguments)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One `parallax run`."""

    program: Program
    hosts: tuple[Host, ...]
    num_workers: tuple[int, ...]
    """On each host."""
    log_dir: str | None = None
    max_restarts: int = 0
    resume: str | None = None
    """Where checkpoints are, and from where a restart goes on; seen from each host's directory."""
    interface: str | None = None
    port: int = 0
    """Of the rendezvous; 0 is any that is free."""
    ssh_config: str | None = None
    start_seconds: float = 60.0
    """In which every host must be ready, and then all must meet."""
    columns: int | None = None
    """The width that is left for a worker's lines."""
    link_rate: float | None = None
    """Bytes a second of the slowest link between the hosts, if it is known."""
    is_local: bool = False
    """Whether no hosts were named: then none are mentioned either."""


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What a host is told first. It travels as data, so no shell sees any of it."""

    num_workers: int
    program: dict[str, Any] | None
    """None where the host is only looked at."""
    is_remote: bool = False
    """Whether it is reached by ssh."""
    directory: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None
    interface: str | None = None
    devices: tuple[str, ...] = ()
    resume: str | None = None
    columns: int | None = None
    link_rate: float | None = None
    port: int = 0
    """To see whether it is free, where that is asked for."""
    start_seconds: float = 60.0
    lapse_seconds: float | None = None
    """Without a sign of life from the launcher for so long, the host ends the job."""


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """What a host's agent needs to know: with whom it meets where, and what it starts."""

    program: dict[str, Any]
    num_workers: int
    run_id: str
    secret: str
    """Signs what the agents tell each other."""
    num_hosts: int
    host_index: int
    address: str
    """Of the meeting point, as `port` is."""
    port: int
    own_address: str
    start_seconds: float
    listen_fd: int | None = None
    """The meeting point's socket, on the host that has it."""


def python(module: str, *arguments: str) -> list[str]:
    """The command that calls `main()` of `module` in a fresh interpreter.

    `python -m` would search the current directory first, where a user's `random.py` or
    `types.py` would break our imports and torch's, though not the script's own.
    """
    code = (
        "import sys; '' in sys.path[:1] and sys.path.pop(0); "
        f"from {module} import main; sys.exit(main())"
    )
    return [sys.executable, "-c", code, *arguments]
