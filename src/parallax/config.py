"""What a user may choose, and the checking of it."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch

from parallax.comm.compression import RowFormat
from parallax.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Initializer = Callable[[torch.Tensor, torch.Size, torch.dtype, int], torch.Tensor]
"""(ids of rows, shape of a row, dtype, the table's seed) → the start values of those rows."""

ROUTES = ("all-reduce", "sharded")
_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `parallelize`; each may also be given there as a keyword.

    A pattern is a shell-style one (`*`, `?`, `[…]`) over parameter names as in
    `model.named_parameters()`; the first that matches wins.
    """

    routes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Pattern → "sharded" or "all-reduce": forces the route of parameters."""

    lazy: bool | Sequence[str] = False
    """Update only the rows that a step touches, also where the optimizer would have changed the
    others (momentum, weight decay, Adam's averages): for all tables, or for these patterns."""

    init: Mapping[str, Initializer] = dataclasses.field(default_factory=dict)
    """Pattern → start values for tables built on the `meta` device (see `parallax.init`)."""

    seed: int = 0
    """Seed of the start values of tables built on the `meta` device."""

    timeout_seconds: float = 300.0
    """The longest wait for other workers, after which an error names them."""

    device: str | None = None
    """Where parameters on the `meta` device are made; by default this worker's GPU or the CPU."""

    interface: str | None = None
    """The network interface over which workers talk, say "eth0". By default gloo takes the one that
    has the address of the host's name, and NCCL chooses. Where GLOO_SOCKET_IFNAME or
    NCCL_SOCKET_IFNAME is set it wins: hosts of one job may name their interfaces differently."""

    bucket_megabytes: float | None = None
    """Size of the buckets in which dense gradients are all-reduced beside backward. By default
    torch's own: a first one of 1 MB, so that the links soon have something to do, then 25 MB."""

    broadcast_buffers: bool = True
    """Give rank 0's buffers (say batch-norm statistics) to all after steps that changed them."""

    lookahead: bool = True
    """Fetch the rows of the next batch while a step computes, where `session.shard` feeds the
    training. The result is the same. A batch is read before the step of the one before it: turn it
    off for a dataset that changes with the training."""

    ledger_steps: int = 1000
    """How many steps the ledger keeps one by one; its totals cover all."""

    wire: str = "float32"
    """How the float32 rows of tables travel: "float32" as they are; "bf16" in half of the bytes, or
    "int8" in a quarter, with a scale for each row. Then the result is no longer exactly that of one
    process. What rounding takes from a row's gradient is added to its next one; a worker keeps it
    for as many rows as it owns, and so do checkpoints."""

    min_partitions: int = 1
    """The gradients of a table's rows travel in at least so many parts, of which owners sum one
    while the next ones come. How many are best is found in the first steps; with `replan=False` it
    is this number."""

    merge_hosts: bool = True
    """Where several workers share a host of several: have them ask for rows and push gradients
    together, so that a row crosses the host's link once each way. The result is the same."""

    replan: bool = True
    """Move tables to the route that moves fewer bytes, as the steps show what they touch. The
    result is the same. Routes forced above stay."""

    run_dir: str | None = None
    """A folder for what was planned, measured and moved, as JSON lines that `parallax plan` reads;
    written by worker 0. The links between hosts are then measured at the start, in 2 s at most."""

    checkpoint_dir: str | None = None
    """Where checkpoints are saved by themselves, on storage that all hosts share; by default the
    folder of `parallax run --resume`, or none. Without a cadence below, every 600 seconds."""

    checkpoint_steps: int | None = None
    """Save when this many steps have passed since the last time."""

    checkpoint_seconds: float | None = None
    """Save when this many seconds have passed since the last time; with `checkpoint_steps` too,
    whichever comes first."""

    checkpoint_keep: int = 2
    """How many of these checkpoints stay; older ones are removed."""

    def __post_init__(self) -> None:
        _check_patterns("routes", self.routes)
        _check_patterns("init", self.init)
        for pattern, route in self.routes.items():
            if route not in ROUTES:
                raise ConfigError(
                    f"Config.routes[{pattern!r}] is {route!r}; allowed are "
                    + " and ".join(repr(name) for name in ROUTES)
                )
        if self.wire not in list(RowFormat):
            allowed = ", ".join(repr(wire.value) for wire in RowFormat)
            raise ConfigError(f"Config.wire is {self.wire!r}; allowed are {allowed}")
        if isinstance(self.lazy, str):
            raise ConfigError(f"Config.lazy takes a bool or a list of patterns, not {self.lazy!r}")
        if self.interface is not None and not (isinstance(self.interface, str) and self.interface):
            raise ConfigError(f"Config.interface takes a name, not {self.interface!r}")
        for name in ("lookahead", "merge_hosts", "replan"):
            if not isinstance(getattr(self, name), bool):
                given = getattr(self, name)
                raise ConfigError(f"Config.{name} takes true or false, not {given!r}")
        _check_positive("timeout_seconds", self.timeout_seconds)
        for name in ("bucket_megabytes", "checkpoint_seconds"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.checkpoint_steps is not None:
            _check_count("checkpoint_steps", self.checkpoint_steps)
        for name in ("ledger_steps", "min_partitions", "checkpoint_keep"):
            _check_count(name, getattr(self, name))
        for name in ("run_dir", "checkpoint_dir"):
            path = getattr(self, name)
            if path is not None and not _is_path(path):
                raise ConfigError(f"Config.{name} takes the path of a folder, not {path!r}")

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a TOML file whose keys are the fields of this class."""
        try:
            fields = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {str(path)!r}: {error}") from error
        return cls().replace(**fields)

    def replace(self, **overrides: Any) -> Config:
        """A copy with some fields changed; an unknown name is an error."""
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown option {', '.join(map(repr, unknown))}; "
                f"the options are {', '.join(known)}"
            )
        return dataclasses.replace(self, **overrides)

    def route_of(self, name: str) -> str | None:
        return first_match(self.routes, name)

    def is_lazy(self, name: str) -> bool:
        if isinstance(self.lazy, bool):
            return self.lazy
        return any(fnmatchcase(name, pattern) for pattern in self.lazy)


def first_match(patterns: Mapping[str, _Value], name: str) -> _Value | None:
    """The value of the first pattern that `name` matches."""
    return next((value for key, value in patterns.items() if fnmatchcase(name, key)), None)


def _check_patterns(field: str, patterns: object) -> None:
    if not isinstance(patterns, Mapping) or not all(isinstance(key, str) for key in patterns):
        raise ConfigError(f"Config.{field} takes a mapping of name patterns, not {patterns!r}")


def _check_positive(field: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"Config.{field} must be a positive number, not {value!r}")


def _check_count(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"Config.{field} must be a whole number of at least 1, not {value!r}")


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))
