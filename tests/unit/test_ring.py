"""What a turn of a ring takes, of sums that take a known time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallax.exchange import links


class Ring:
    """Workers that a clock of their own runs for: sums take as long as is given."""

    def __init__(self, num_workers: int, took: Sequence[float]) -> None:
        self.now, self.num_sums = 0.0, 0
        self.num_workers = num_workers
        self._took = took

    def turn(self, monkeypatch: pytest.MonkeyPatch) -> float:
        monkeypatch.setattr(links.time, "perf_counter", lambda: self.now)
        peers: Any = SimpleNamespace(
            num_workers=self.num_workers,
            waiting=lambda where: nullcontext(),
            reduce=self._reduce,
            total=lambda values, reduction, where: 2 * values,  # Another worker's.
        )
        return links._ring_turn(peers, torch.device("cpu"))

    def _reduce(self, values: torch.Tensor) -> None:
        self.now += self._took[self.num_sums]
        self.num_sums += 1


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_turn_is_its_part_of_a_sum(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first ones of a connection are slow.
    ring = Ring(num_workers, [0.009, 0.006, 0.001, 0.006, 0.007])
    found = ring.turn(monkeypatch)
    assert found == pytest.approx(2 * 0.006 / (2 * (num_workers - 1)))
    assert ring.num_sums == 5


@pytest.mark.parametrize(("seconds", "num_sums"), [(0.02, 5), (0.05, 2), (0.1, 1), (5.0, 1)])
def test_sums_of_many_workers_are_as_few_as_the_time_allows(
    seconds: float, num_sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest worker's clock decides, which says twice as much here, so that all stop alike."""
    ring = Ring(48, [seconds] * 5)
    assert ring.turn(monkeypatch) == pytest.approx(2 * seconds / (2 * 47))
    assert ring.num_sums == num_sums
