"""What a turn of a ring takes, of sums that take a known time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallax.planning import links


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
            total=self._total,
        )
        return links._ring_turn(peers, torch.device("cpu"))

    def _reduce(self, values: torch.Tensor) -> None:
        self.now += self._took[self.num_sums]
        self.num_sums += 1

    def _total(self, values: torch.Tensor, reduction: object, where: str) -> torch.Tensor:
        self.now += self._took[self.num_sums - 1]  # It goes the same way.
        return 1.5 * values  # Another worker's clock.


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_turn_is_its_part_of_a_sum(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first one of a connection is slow.
    ring = Ring(num_workers, [0.009, 0.006, 0.001, 0.006, 0.007, 0.004])
    found = ring.turn(monkeypatch)
    assert found == pytest.approx(1.5 * 0.006 / (2 * (num_workers - 1)))
    assert ring.num_sums == 6


@pytest.mark.parametrize(("seconds", "num_sums"), [(0.02, 6), (0.03, 3), (0.04, 2), (0.05, 1)])
def test_sums_of_many_workers_are_as_few_as_the_time_allows(
    seconds: float, num_sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest worker's clock decides, so that all stop alike."""
    ring = Ring(48, [seconds] * 6)
    assert ring.turn(monkeypatch) == pytest.approx(1.5 * seconds / (2 * 47))
    assert ring.num_sums == num_sums
    assert ring.now < 0.25


def test_a_sum_that_takes_longer_than_there_is_time_for_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = Ring(48, [0.5])
    assert ring.turn(monkeypatch) == pytest.approx(1.5 * 0.5 / (2 * 47))
