"""Which settings `make bench` and `make bench-quick` measure, and why which peer is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.contest import Setting
from benchmarks.limits import wire_seconds
from benchmarks.workloads import by_name
from parallax.planning import cost

PEERS = ("ddp-sparse", "horovod", "torchrec", "deepspeed")
LOOKED_UP = ("parallax", *PEERS, "alone")
DENSE = ("parallax", "ddp-dense", "horovod", "deepspeed", "alone")
PERCENTS = (0.5, 2, 10, 50, 100)
MAX_STEP_SECONDS = 4.0
"""Engines whose steps take longer than this would be most of the suite's time."""
WITH_TENSORFLOW = {
    ("lm", 2, "200mbit"),
    ("lm", 4, "200mbit"),
    ("dlrm", 4, "200mbit"),
    ("lm", 2, "1gbit"),
    ("nmt", 2, "1gbit"),
    ("dlrm", 2, "1gbit"),
}

IN_FEWER_BITS = {("lm", 8, "200mbit")}
"""Where Parallax also moves rows as bf16 and int8."""


def full() -> list[Setting]:
    return [*_emulated(), *_real(), *_sparsity(), _small()]


def quick() -> list[Setting]:
    """Under ten minutes: one workload with tables and all engines, one without any and DDP."""
    images = _dense(2, "1gbit", False, turn_seconds=1.0)
    slow = dict.fromkeys(("horovod", "deepspeed"), "to be quick; the whole suite has it")
    return [
        _looked_up("lm", 4, "200mbit", True, turn_seconds=1.0),
        replace(
            images,
            engines=tuple(name for name in images.engines if name not in slow),
            left_out={**images.left_out, **slow},
        ),
    ]


def _emulated() -> Iterator[Setting]:
    for workload in ("lm", "lm-large", "nmt", "dlrm"):
        for num_hosts in (2, 4, 8):
            yield _looked_up(workload, num_hosts, "200mbit", True)
    yield _looked_up("dlrm", 4, "1gbit", True)
    for num_hosts in (2, 4, 8):
        yield _dense(num_hosts, "200mbit", True)


def _real() -> Iterator[Setting]:
    for num_hosts in (2, 4):
        for workload in ("lm", "lm-large", "nmt", "dlrm"):
            yield _looked_up(workload, num_hosts, "1gbit", False)
        # Short turns and many of them for what differs less than the machine does.
        yield _dense(num_hosts, "1gbit", False, repetitions=30, turn_seconds=0.6)


def _sparsity() -> Iterator[Setting]:
    for percent in PERCENTS:
        yield _looked_up(f"sparsity-{percent:g}", 4, "200mbit", True, turn_seconds=1.0)


def _small() -> Setting:
    """Two workers with a core each and no link to wait for: what the engines themselves cost."""
    left_out = {
        "tensorflow": "it has no layers for this workload",
        **dict.fromkeys(("horovod", "deepspeed"), "to save time: the goal is against DDP"),
    }
    engines = ("parallax", "ddp-sparse", "ddp-dense", "torchrec", "alone")
    # Short turns and many of them: steps of a few milliseconds differ from turn to turn.
    return Setting("small", 2, None, False, engines, 15, 0.6, left_out)


def _looked_up(
    workload: str, num_hosts: int, rate: str, is_emulated: bool, **options: Any
) -> Setting:
    engines = [*LOOKED_UP, *(["torchrec-table"] if workload == "dlrm" else [])]
    reasons = {
        "ddp-dense": _why_not_dense(workload, num_hosts, rate),
        "tensorflow": _why_not_tensorflow(workload, num_hosts, rate),
    }
    engines += [name for name, why in reasons.items() if why is None]
    if (workload, num_hosts, rate) in IN_FEWER_BITS:
        engines += ["parallax-bf16", "parallax-int8"]
    left_out = {name: why for name, why in reasons.items() if why is not None}
    where = (workload, num_hosts, rate, is_emulated, tuple(engines))
    return Setting(*where, **options, left_out=left_out)


def _why_not_dense(workload: str, num_hosts: int, rate: str) -> str | None:
    tables = cost.allreduce_bytes(by_name(workload).table_bytes, num_hosts)
    seconds = wire_seconds(tables, rate)
    if seconds <= MAX_STEP_SECONDS or (workload, num_hosts) == ("lm", 2):  # Once it is shown.
        return None
    return f"its step takes {seconds:.0f} s on the wire alone"


def _why_not_tensorflow(workload: str, num_hosts: int, rate: str) -> str | None:
    if (workload, num_hosts, rate) in WITH_TENSORFLOW:
        return None
    if workload == "nmt" and rate == "200mbit":
        return "where layers are emulated it does not read dense variables, most of this model"
    if num_hosts > 4:
        return f"its {3 * num_hosts} processes would wait for this machine's cores"
    return "to save time: it takes half a minute to start, and is in some settings only"


def _dense(num_hosts: int, rate: str, is_emulated: bool, **options: Any) -> Setting:
    left_out = {
        "ddp-sparse": "without tables it is DDP dense",
        "torchrec": "there is no table to shard",
        "tensorflow": "there is no table for its servers",
    }
    return Setting("resnet", num_hosts, rate, is_emulated, DENSE, **options, left_out=left_out)
