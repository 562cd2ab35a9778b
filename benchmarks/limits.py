"""How fast a step can be at best, and how many bytes it has to move."""

from __future__ import annotations

from statistics import mean

import numpy as np

from benchmarks.workloads import Table, Workload
from benchmarks.workloads.workload import POOL
from parallax.planning import cost

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_a_second(rate: str) -> float:
    """Of a rate as `tc` writes it: 200mbit, 1gbit."""
    number, unit = rate[:-4], rate[-4:]
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        raise ValueError(f"rate={rate!r}: take a number with {', '.join(_UNITS)}, as in 200mbit")
    return float(number) * _UNITS[unit]


def wire_seconds(size_bytes: float, rate: str | None) -> float:
    if rate is None:
        return 0.0
    return 8 * size_bytes / bits_a_second(rate)


def limit_seconds(compute_seconds: float, wire_bytes: float, rate: str | None) -> float:
    """No step is shorter than its computing, nor than the time its bytes need on the link."""
    return max(compute_seconds, wire_seconds(wire_bytes, rate))


def formula_bytes(workload: Workload, num_workers: int) -> float:
    """What a worker sends if every parameter takes the route of the fewest bytes."""
    layers = sum(parameter.numel() for parameter in workload.layers().parameters())
    batches = [workload.batch(step, rank) for step in range(POOL) for rank in range(num_workers)]
    tables = 0.0
    for place, table in enumerate(workload.tables):
        rows = mean(len(np.unique(batch.ids[place])) for batch in batches)
        tables += _table_bytes(table, rows, num_workers)
    return float(tables + cost.allreduce_bytes(4 * layers, num_workers))


def _table_bytes(table: Table, rows: float, num_workers: int) -> float:
    as_rows = cost.sharded_bytes(rows, 4 * table.width, num_workers)
    return float(min(as_rows, cost.allreduce_bytes(table.size_bytes, num_workers)))
