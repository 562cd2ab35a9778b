"""Which settings `make bench` and `make bench-quick` measure."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.contest import Setting

PEERS = ("ddp-sparse", "horovod", "torchrec", "deepspeed")
LOOKED_UP = ("parallax", *PEERS, "alone")
DENSE = ("parallax", "ddp-dense", "horovod", "deepspeed", "alone")
SWEPT = ("parallax", "ddp-sparse", "ddp-dense", "alone")
PERCENTS = (0.5, 2, 10, 50, 100)


def full() -> list[Setting]:
    return [*_emulated(), *_real(), *_sparsity()]


def quick() -> list[Setting]:
    """Under ten minutes, the same engines: one workload with tables and one without."""
    return [
        Setting("lm", 4, "200mbit", True, (*LOOKED_UP, "tensorflow"), turn_seconds=1.0),
        Setting("resnet", 2, "1gbit", False, ("parallax", "ddp-dense", "alone"), turn_seconds=1.0),
    ]


def _emulated() -> Iterator[Setting]:
    for num_hosts in (2, 4, 8):
        yield Setting("lm", num_hosts, "200mbit", True, _language_engines(num_hosts))
    for num_hosts in (2, 4):  # Eight copies of these tables need more memory than 24 GiB.
        yield Setting("lm-large", num_hosts, "200mbit", True, LOOKED_UP)
    yield Setting("lm-large", 8, "200mbit", True, ("parallax", "torchrec"))
    for num_hosts in (2, 4, 8):
        yield Setting("nmt", num_hosts, "200mbit", True, LOOKED_UP)
        yield Setting("dlrm", num_hosts, "200mbit", True, (*LOOKED_UP, "torchrec-table"))
        yield Setting("resnet", num_hosts, "200mbit", True, DENSE)


def _language_engines(num_hosts: int) -> tuple[str, ...]:
    engines: tuple[str, ...] = LOOKED_UP
    if num_hosts == 2:  # Two hosts are enough to show it, and a step takes 16 s.
        engines += ("ddp-dense",)
    if num_hosts <= 4:
        engines += ("tensorflow",)
    return engines


def _real() -> Iterator[Setting]:
    for num_hosts in (2, 4):
        yield Setting("lm", num_hosts, "1gbit", False, LOOKED_UP)
        yield Setting("nmt", num_hosts, "1gbit", False, LOOKED_UP)
        yield Setting("dlrm", num_hosts, "1gbit", False, (*LOOKED_UP, "torchrec-table"))
        # Short turns and many of them for what differs less than the machine does.
        yield Setting("resnet", num_hosts, "1gbit", False, DENSE, 30, 0.6)


def _sparsity() -> Iterator[Setting]:
    for percent in PERCENTS:
        yield Setting(f"sparsity-{percent:g}", 4, "200mbit", True, SWEPT)
