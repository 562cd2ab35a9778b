"""Topology: which workers share a host, and on which type of device all of them train."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from parallax.errors import ConfigError


@dataclass(frozen=True)
class Arrival:
    """What a worker sends to the others when it joins them."""

    host: str
    """Identifies the host: equal for all workers of one host."""
    host_name: str
    device: str | None
    """The type of device that holds its model; None: any that all workers can use."""
    has_gpu: bool

    @staticmethod
    def here(device: torch.device | None) -> Arrival:
        kind = None if device is None else device.type
        return Arrival(_identity(), socket.gethostname(), kind, torch.cuda.is_available())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Arrival:
        return Arrival(**json.loads(text))


@dataclass(frozen=True)
class Hosts:
    """Which workers share a host. Workers find this out when they join, with any launcher."""

    workers: tuple[tuple[int, ...], ...]
    """By host: the ranks of its workers, ascending. Hosts are ordered by their first rank."""
    names: tuple[str, ...]
    """By host; two hosts may have the same name."""
    index: int
    """The number of this worker's host."""
    local_rank: int
    """The number of this worker among those of its host."""

    @staticmethod
    def of(arrivals: Sequence[Arrival], rank: int) -> Hosts:
        """Group workers by host. `arrivals` are in the order of ranks."""
        found: dict[str, list[int]] = {}
        for each, arrival in enumerate(arrivals):
            found.setdefault(arrival.host, []).append(each)
        here = found[arrivals[rank].host]
        return Hosts(
            tuple(map(tuple, found.values())),
            tuple(arrivals[ranks[0]].host_name for ranks in found.values()),
            list(found.values()).index(here),
            here.index(rank),
        )

    @property
    def num_local_workers(self) -> int:
        """The number of workers on this worker's host."""
        return len(self.workers[self.index])

    @property
    def are_shared(self) -> bool:
        """Whether there are several hosts, and one of them has several workers."""
        return 1 < len(self.workers) < sum(map(len, self.workers))

    def __len__(self) -> int:
        return len(self.workers)


def common_device(arrivals: Sequence[Arrival]) -> str:
    """Return the type of device on which all workers train. Raise if models are on different types.

    If no model is on a device yet, it is "cuda" if every worker has a GPU, else "cpu".
    """
    chosen = [arrival.device for arrival in arrivals]
    kinds = [kind for kind in dict.fromkeys(chosen) if kind is not None]
    if not kinds:
        return "cuda" if all(arrival.has_gpu for arrival in arrivals) else "cpu"
    if len(kinds) > 1:
        parts = [f"{kind} on {_workers(_where(chosen, kind))}" for kind in kinds]
        raise ConfigError(
            f"the models are on different kinds of devices ({'; '.join(parts)}), which cannot "
            f"exchange gradients. {_gpus(arrivals)}. Put every model on a GPU, or every one on the "
            "CPU with model.cpu() or device='cpu'"
        )
    lacking = [r for r, a in enumerate(arrivals) if a.device is None and not a.has_gpu]
    if kinds == ["cuda"] and lacking:
        raise ConfigError(
            f"the models of {_workers(_where(chosen, 'cuda'))} are on GPUs, but "
            f"{_workers(lacking)} has none for its own. {_gpus(arrivals)}. Give every worker one, "
            "or put every model on the CPU with model.cpu() or device='cpu'"
        )
    return kinds[0]


def _where(chosen: Sequence[str | None], kind: str) -> list[int]:
    return [rank for rank, each in enumerate(chosen) if each == kind]


def _gpus(arrivals: Sequence[Arrival]) -> str:
    with_gpu = [rank for rank, arrival in enumerate(arrivals) if arrival.has_gpu]
    return f"GPUs are seen by {_workers(with_gpu)}" if with_gpu else "No worker sees a GPU"


def _workers(ranks: Sequence[int]) -> str:
    return " and ".join(f"worker {rank}" for rank in ranks)


def _identity() -> str:
    """Return an identifier of this host, whose workers share a loopback interface.

    Two machines may have the same name, but their boot ids differ. Containers and network
    namespaces of one machine count as separate hosts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # Not Linux.
        boot, network = "", ""
    return f"{socket.gethostname()} {boot} {network}"
