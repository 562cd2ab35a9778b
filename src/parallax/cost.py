"""(parameter, number of workers, route) → bytes a worker sends in a step. Pure functions.

N workers, a table of rows of D elements, U rows touched by a worker in a step:

    all-reduced        2·S·(N−1)/N        for S bytes of gradient (ring: reduce-scatter, all-gather)
    sharded by rows    2·U·D·(N−1)/N      elements (pulled and pushed), and the ids twice
    gathered (DDP)     (N−1)·U·D          elements, and the ids

Owners are spread evenly, so a worker serves as many rows as it asks for on average: what a worker
sends equals what it receives, and (N−1)/N of its rows belong to others.
"""

from __future__ import annotations

ID_BYTES = 4
"""An id travels as its place in the owner's shard, 32 bits."""


def allreduce_bytes(size_bytes: float, num_workers: int) -> float:
    """Sent by a worker to all-reduce `size_bytes`."""
    return 2 * size_bytes * (num_workers - 1) / num_workers


def pull_bytes(asked_rows: int, served_rows: int, row_bytes: int) -> int:
    """Sent by a worker that asks others for some rows and serves others some."""
    return asked_rows * ID_BYTES + served_rows * row_bytes


def push_bytes(pushed_rows: int, row_bytes: int) -> int:
    """Sent by a worker that pushes the gradients of rows which others own."""
    return pushed_rows * (row_bytes + ID_BYTES)


def sharded_bytes(rows: float, row_bytes: int, num_workers: int) -> float:
    """Sent by a worker on average, if each of N workers touches `rows` rows in a step."""
    return 2 * rows * (row_bytes + ID_BYTES) * (num_workers - 1) / num_workers
