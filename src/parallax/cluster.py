"""Who runs where: read from the environment that a launcher made. Nobody else reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallax.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """This worker's place among the workers."""

    rank: int = 0
    num_workers: int = 1
    local_rank: int = 0
    launched: bool = False

    @property
    def device(self) -> torch.device:
        """This worker's GPU if there is one, else the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")


def find_place() -> Place:
    """From a process group that the script made itself, or torchrun's variables, or one worker."""
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        local_rank = _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
        return Place(rank, dist.get_world_size(), local_rank, launched=True)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Place()
    rank, num_workers = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < num_workers:
        raise ConfigError(
            f"RANK is {rank}, but must lie between 0 and WORLD_SIZE - 1 = {num_workers - 1}"
        )
    local_rank = _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    return Place(rank, num_workers, local_rank, launched=True)


def resume_dir() -> str | None:
    """Where `parallax run --resume` looks for the newest checkpoint; None if it was not given."""
    return os.environ.get("PARALLAX_RESUME") or None


def step_file() -> str | None:
    """The file in which the launcher reads this worker's step; None if nobody does."""
    return os.environ.get("PARALLAX_STEP_FILE") or None


def _integer(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is {os.environ[name]!r}, not a number; "
            "start the script with `parallax run`, torchrun, or plain python"
        ) from None
