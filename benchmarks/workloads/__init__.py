"""What is trained: tables, the layers behind them, batches and an optimizer's settings.

A workload is plain data and numpy until a worker asks for its layers, so that engines of other
frameworks can train it too. `by_name` finds one; `Workload` is what each of them offers.
"""

from __future__ import annotations

import importlib

from benchmarks.workloads.workload import Batch, Table, Workload

__all__ = ["NAMES", "TEXT", "Batch", "Table", "Workload", "by_name"]

NAMES = (
    "lm",
    "lm-large",
    "lm-adam",
    "lm-adam-fused",
    "nmt",
    "dlrm",
    "dlrm-adam",
    "dlrm-adam-fused",
    "resnet",
    "small",
    "sparsity-<percent>",
)
_KINDS = ("lm", "nmt", "dlrm", "resnet", "small", "sparsity")
TEXT = "text"
"""Only to converge on; it has no batches to draw from nothing."""


def by_name(name: str) -> Workload:
    kind, _, variant = name.partition("-")
    if kind not in _KINDS and name != TEXT:
        raise ValueError(f"workload {name!r} is none of {', '.join(NAMES)}")
    module = importlib.import_module(f"benchmarks.workloads.{kind}")
    workload: Workload = module.make(variant)
    return workload
