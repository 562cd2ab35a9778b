"""Data-parallel training for PyTorch that knows what is sparse.

    session = parallax.parallelize(model, optimizer)
    for batch in session.shard(loader):
        ...

The names below are the whole public surface. They are loaded on first use, so that the command
line, which imports this package too, does not pay for importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallax import errors, init, nn
    from parallax.api import Session, parallelize
    from parallax.config import Config
    from parallax.observability.ledger import Ledger
    from parallax.planning.plan import Plan

__all__ = ["Config", "Ledger", "Plan", "Session", "errors", "init", "nn", "parallelize"]

_HOMES = {
    "Config": "parallax.config",
    "Ledger": "parallax.observability.ledger",
    "Plan": "parallax.planning.plan",
    "Session": "parallax.api",
    "parallelize": "parallax.api",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:
        return importlib.import_module(f"parallax.{name}")
    raise AttributeError(f"module 'parallax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
