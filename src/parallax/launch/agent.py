"""The agent: a process between the launcher and the workers, with torchrun's machinery in it."""

from __future__ import annotations

import os
import sys
from typing import Any

from parallax.launch.job import Job
from parallax.launch.lifeline import PARENT_PID, die_with_parent
from parallax.launch.rundir import RUN_DIRECTORY, RunDirectory, write_json

_MONITOR_SECONDS = 0.1


def main() -> int:
    """Run the job of the command line to its end and write down how its workers ended."""
    # Before torch is imported: that takes seconds, in which the launcher may be killed.
    die_with_parent(int(os.environ[PARENT_PID]))
    directory = RunDirectory(os.environ[RUN_DIRECTORY])
    os.environ[PARENT_PID] = str(os.getpid())
    failures = _launch(Job.from_agent_arguments(sys.argv[1:]), directory)
    write_json(directory.result, failures)
    return 0


def _launch(job: Job, directory: RunDirectory) -> list[dict[str, Any]]:
    """Start the workers and wait; rank, return code and time of each that failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from parallax.launch.rendezvous import ADDRESS, LoopbackRendezvous

    rendezvous_handler_registry.register("parallax-loopback", LoopbackRendezvous)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.num_workers,
        run_id=job.run_id,
        rdzv_backend="parallax-loopback",
        rdzv_endpoint=f"{ADDRESS}:0",
        local_addr=ADDRESS,
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=directory.elastic),
    )
    python, *arguments = job.worker_command()
    # torch replaces ${local_rank} in the arguments, and $$ by $.
    arguments = [argument.replace("$", "$$") for argument in arguments]
    try:
        elastic_launch(config, python)(*arguments)
    except ChildFailedError as error:
        return [
            {"rank": rank, "return_code": failure.exitcode, "time_seconds": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
    return []
