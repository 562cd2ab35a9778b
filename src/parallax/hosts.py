"""Which workers share a host, and on what kind of device all train."""

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
    """What a worker tells the others of itself when it joins them."""

    host: str
    """Equal for workers of one host."""
    host_name: str
    device: str | None
    """The type of device where its model is; None: wherever all can be."""
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
    """Which workers share a host, as they found when they met, whatever launched them."""

    workers: tuple[tuple[int, ...], ...]
    """By host: the ranks of its workers, ascending. Hosts stand in the order of their first."""
    names: tuple[str, ...]
    """Of each host; two may have the same."""
    index: int
    """Which of the hosts is this worker's."""
    local_rank: int
    """This worker's place among the workers of its host."""

    @staticmethod
    def of(arrivals: Sequence[Arrival], rank: int) -> Hosts:
        """From what each worker told, in the order of ranks."""
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
        """How many workers this worker's host has."""
        return len(self.workers[self.index])

    @property
    def are_shared(self) -> bool:
        """There are several hosts, and one of them has several workers."""
        return 1 < len(self.workers) < sum(map(len, self.workers))

    def __len__(self) -> int:
        return len(self.workers)


def common_device(arrivals: Sequence[Arrival]) -> str:
    """The type of device on which all workers train; models must not be on different ones.

    Where no model says, it is "cuda" if every worker has a GPU, else "cpu".
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
    """Of this host: workers on one reach each other over its loopback interface.

    Two machines may have one name (boot ids differ), and containers or network namespaces of one
    machine are hosts of their own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        boot, network = "", ""
    return f"{socket.gethostname()} {boot} {network}"
