"""What a turn of a ring takes, of sums that take a known time."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallax.exchange import links


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_turn_is_its_part_of_a_sum(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([9.0, 6.0, 1.0, 6.0, 7.0])  # The first ones of a connection are slow.
    now = [0.0]

    def reduce(values: torch.Tensor) -> None:
        now[0] += next(took)

    monkeypatch.setattr(links.time, "perf_counter", lambda: now[0])
    peers: Any = SimpleNamespace(
        num_workers=num_workers,
        waiting=lambda where: nullcontext(),
        reduce=reduce,
        total=lambda values, reduction, where: 2 * values,  # Another worker's.
    )
    found = links._ring_turn(peers, torch.device("cpu"))
    assert found == pytest.approx(2 * 6.0 / (2 * (num_workers - 1)))
