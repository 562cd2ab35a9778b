"""This worker's rank, read from the environment variables of a launcher.

No other module outside of launch/ reads the environment.

[Note: srun] Slurm also sets SLURM_PROCID, SLURM_LOCALID and SLURM_NODEID for the script of
`sbatch`, and SLURM_NTASKS for every process of an allocation. Only srun sets SLURM_STEP_NUM_TASKS,
the number of tasks of the current step. So this variable alone distinguishes `srun python train.py`
from a plain `python train.py` inside a job. The shell of an interactive `salloc` is a step as well,
with a special step number.
"""

from __future__ import annotations

import math
import os
import re
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallax.cluster import variables
from parallax.errors import ConfigError

_HOW = "start the script with `parallax run`, torchrun, srun, Ray Train or plain python"
_FIRST_PORT, _NUM_PORTS = 20000, 10000
"""Below the range from which Linux gives ports to outgoing connections (32768 to 60999)."""
_FIRST_SPECIAL_STEP = 2**32 - 16
"""Step numbers of Slurm's batch script, interactive shell and the like start here."""
_INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Variable → its value for an interface; NCCL takes a name without `=` for a prefix."""
_own_values: dict[str, tuple[str, str | None]] = {}
"""Variables that `use_interface` has set → their value, and the value before. Another session may
replace these, but not values of the user."""


@dataclass(frozen=True)
class Meeting:
    """Address of the store where workers meet if no launcher connects them."""

    address: str
    port: int
    name: str
    """Separates jobs that use the same port by accident."""
    remote: bool = False
    """Workers of other hosts must reach the address, and the user has not named one."""


@dataclass(frozen=True)
class Place:
    """This worker's rank among all workers."""

    rank: int = 0
    num_workers: int = 1
    local_rank: int | None = None
    """From the launcher; selects this worker's GPU."""
    meeting: Meeting | None = None
    """None: the launcher or the script connects the workers."""

    @property
    def device(self) -> torch.device:
        """This worker's GPU if there is one, else the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", (self.local_rank or 0) % torch.cuda.device_count())
        return torch.device("cpu")


def find_place() -> Place:
    """Return this worker's place: from a process group that the script or Ray made, from the
    variables of torchrun or srun, or else that of a single worker."""
    if dist.is_available() and dist.is_initialized():
        local_rank = _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None
        return Place(dist.get_rank(), dist.get_world_size(), local_rank)
    if "RANK" in os.environ:
        return _place_by_torchrun()
    if _is_srun_task():
        return _place_by_srun()
    if "WORLD_SIZE" in os.environ and _integer("WORLD_SIZE") != 1:
        raise ConfigError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no RANK; {_HOW}")
    return Place()


def use_interface(name: str | None) -> None:
    """Let process groups that are made from now on use this network interface.

    Variables that the user has set take precedence: hosts of one job may name their interfaces
    differently.
    """
    for variable, (value, previous) in _own_values.items():
        if os.environ.get(variable) == value:
            del os.environ[variable]
            os.environ.update({} if previous is None else {variable: previous})
    _own_values.clear()
    values = {variable: os.environ.get(variable) for variable in _INTERFACES}
    chosen = os.environ.get(variables.INTERFACE)  # The user's variables take precedence over it.
    wanted = [v for v, form in _INTERFACES.items() if values[v] in (None, form.format(chosen))]
    if name is None or not wanted:
        return
    known = [found for _, found in socket.if_nameindex()]
    if name not in known:
        raise ConfigError(
            f"Config.interface is {name!r}, but this host ({socket.gethostname()}) has "
            f"{', '.join(known)}; where hosts differ, set {' and '.join(wanted)} on each"
        )
    for variable in wanted:
        os.environ[variable] = _INTERFACES[variable].format(name)
        _own_values[variable] = (os.environ[variable], values[variable])


# torchrun -----------------------------------------------------------------------------------


def _place_by_torchrun() -> Place:
    rank, num_workers = _integer("RANK"), _integer("WORLD_SIZE")
    _check_below("RANK", rank, "WORLD_SIZE", num_workers)
    local_rank = None
    if "LOCAL_RANK" in os.environ:
        local_rank = _integer("LOCAL_RANK")
        size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE"
        _check_below("LOCAL_RANK", local_rank, size, _integer(size))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and num_workers > 1:
        raise ConfigError(
            f"RANK and WORLD_SIZE are given, but not {' and '.join(missing)}, where the workers "
            f"meet; {_HOW}"
        )
    return Place(rank, num_workers, local_rank)


# Slurm --------------------------------------------------------------------------------------


def _is_srun_task() -> bool:
    """Whether srun started this process as one of several. See [Note: srun]."""
    if "SLURM_STEP_NUM_TASKS" not in os.environ or "SLURM_PROCID" not in os.environ:
        return False
    if "SLURM_STEP_ID" in os.environ and _integer("SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return False
    return _integer("SLURM_STEP_NUM_TASKS") > 1


def _place_by_srun() -> Place:
    rank, num_workers = _integer("SLURM_PROCID"), _integer("SLURM_STEP_NUM_TASKS")
    _check_below("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", num_workers)
    if "WORLD_SIZE" in os.environ and _integer("WORLD_SIZE") != num_workers:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but srun started {num_workers} tasks: "
            "unset it, or set RANK, MASTER_ADDR and MASTER_PORT too"
        )
    local_rank = _integer("SLURM_LOCALID") if "SLURM_LOCALID" in os.environ else None
    return Place(rank, num_workers, local_rank, _slurm_meeting())


def _slurm_meeting() -> Meeting:
    job, step = _integer("SLURM_JOB_ID"), _integer("SLURM_STEP_ID")
    given = os.environ.get("MASTER_ADDR")
    several = _integer("SLURM_STEP_NUM_NODES") > 1 if "SLURM_STEP_NUM_NODES" in os.environ else True
    address = given or (_first_slurm_host() if several else "127.0.0.1")
    port = _integer("MASTER_PORT") if "MASTER_PORT" in os.environ else slurm_port(job, step)
    return Meeting(address, port, f"slurm/{job}.{step}", remote=several and not given)


def slurm_port(job: int, step: int) -> int:
    """Return a port for a job step. Jobs and steps with close numbers, which may share a host, get
    different ports."""
    return _FIRST_PORT + (97 * job + step) % _NUM_PORTS


def _first_slurm_host() -> str:
    """Return the first host of the step, where task 0 runs."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if os.environ.get(name):
            return first_host(os.environ[name])
    raise ConfigError(
        "srun's SLURM_STEP_NODELIST is not set: set MASTER_ADDR to the host of task 0, the same "
        "on every host"
    )


def first_host(hosts: str) -> str:
    """Return the first name of a list of Slurm's, such as `node[01-04,7],gpu-[1,3]x`."""
    found = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", hosts)
    if found is None:
        raise ConfigError(
            f"Slurm's list of hosts is {hosts!r}, which cannot be read; set MASTER_ADDR to the "
            "host of task 0"
        )
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", found[0])


# Variables of `parallax run` ----------------------------------------------------------------


def resume_dir() -> str | None:
    """Return the folder of `parallax run --resume`, if it was given."""
    return os.environ.get(variables.RESUME) or None


def link_rate() -> float | None:
    """Return the bytes per second of the slowest link between the hosts, if `parallax check` was
    run."""
    text = os.environ.get(variables.LINK_RATE, "")
    try:
        rate = float(text)
    except ValueError:
        return None
    return rate if 0 < rate < math.inf else None


def step_file_path() -> str | None:
    """Return the file from which the launcher reads this worker's step, if there is one."""
    return os.environ.get(variables.STEP_FILE) or None


# Numbers ------------------------------------------------------------------------------------


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if not 0 <= value < limit:
        raise ConfigError(
            f"{name} is {value}, but must lie between 0 and {limit_name} - 1 = {limit - 1}; {_HOW}"
        )


def _integer(name: str) -> int:
    value = os.environ.get(name)
    try:
        return int(value or "")
    except ValueError:
        what = "not set" if value is None else f"{value!r}, not a number"
        raise ConfigError(f"the environment variable {name} is {what}; {_HOW}") from None
