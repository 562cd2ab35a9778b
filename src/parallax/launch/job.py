"""A job: what is to run, on how many workers, and the commands that start its processes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["script", "module"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One `parallax run`."""

    num_workers: int
    kind: Kind
    program: str
    """The path of a script, or the dotted name of a module."""
    arguments: tuple[str, ...] = ()
    log_dir: str | None = None
    run_id: str = field(default_factory=lambda: os.urandom(8).hex())

    def agent_command(self) -> list[str]:
        """What the launcher starts."""
        arguments = (self.run_id, str(self.num_workers), self.kind, self.program, *self.arguments)
        return _python("parallax.launch.agent", arguments)

    @classmethod
    def from_agent_arguments(cls, argv: list[str]) -> Job:
        """The job that the agent was started for: the inverse of `agent_command`."""
        run_id, num_workers, kind, program, *arguments = argv
        return cls(
            num_workers=int(num_workers),
            kind="module" if kind == "module" else "script",
            program=program,
            arguments=tuple(arguments),
            run_id=run_id,
        )

    def worker_command(self) -> list[str]:
        """What the agent starts, once for each worker."""
        return _python("parallax.launch.worker", (self.kind, self.program, *self.arguments))


def _python(module: str, arguments: tuple[str, ...]) -> list[str]:
    """The command that calls `main()` of `module` in a fresh interpreter.

    `python -m` would search the current directory first, where a user's `random.py` or
    `types.py` would break our imports and torch's, though not the script's own.
    """
    code = (
        "import sys; '' in sys.path[:1] and sys.path.pop(0); "
        f"from {module} import main; sys.exit(main())"
    )
    return [sys.executable, "-c", code, *arguments]
