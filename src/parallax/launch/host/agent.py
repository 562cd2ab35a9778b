"""The agent: a process between the host process and the workers, with torchrun's machinery."""

from __future__ import annotations

import math
import os
from typing import Any

from parallax.launch.host.lifeline import PARENT_PID, die_with_parent
from parallax.launch.host.rundir import RUN_DIRECTORY, RunDirectory, read_json, write_json
from parallax.launch.job import AgentSpec, Program

_MONITOR_SECONDS = 0.1


def main() -> int:
    """Run this host's part of the job to its end and write down how its workers ended."""
    # Before torch is imported: that takes seconds, in which the parent may be killed.
    die_with_parent(int(os.environ[PARENT_PID]))
    directory = RunDirectory(os.environ[RUN_DIRECTORY])
    os.environ[PARENT_PID] = str(os.getpid())
    failures = _launch(AgentSpec(**read_json(directory.agent_spec)), directory)
    write_json(directory.result, failures)
    return 0


def _launch(spec: AgentSpec, directory: RunDirectory) -> list[dict[str, Any]]:
    """Start the workers and wait; rank, return code and time of each that failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from parallax.launch.host.rendezvous import BACKEND, HostsRendezvous

    # What the registry makes is told by us, not by the configuration, which torch logs.
    rendezvous_handler_registry.register(BACKEND, lambda given: HostsRendezvous(spec, given))
    config = LaunchConfig(
        min_nodes=spec.num_hosts,
        max_nodes=spec.num_hosts,
        nproc_per_node=spec.num_workers,
        run_id=spec.run_id,
        rdzv_backend=BACKEND,
        rdzv_endpoint=f"{spec.address}:{spec.port}",
        rdzv_configs={"join_timeout": math.ceil(spec.start_seconds)},
        local_addr=spec.own_address,
        # A restart is the launcher's to decide: it alone knows which hosts are left.
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=directory.elastic),
    )
    python, *arguments = Program(**spec.program).worker_command()
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
