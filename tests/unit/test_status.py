"""The line that says how a job is doing."""

from __future__ import annotations

import pytest

from parallax.launch import status
from parallax.launch.status import Status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one element is the time."""
    now = [100.0]
    monkeypatch.setattr(status.time, "monotonic", lambda: now[0])
    return now


def test_workers_that_have_said_nothing_yet_are_only_counted(clock: list[float]) -> None:
    line = Status()
    clock[0] += 3725
    assert line.line([None, 4], num_workers=2, num_hosts=1) == "2 workers · 1:02:05"
    assert line.line([], num_workers=1, num_hosts=1) == "1 worker · 1:02:05"


def test_the_step_is_the_one_that_all_have_taken(clock: list[float]) -> None:
    line = Status()
    assert line.line([7, 5, 6], 3, 2) == "step 5 · 3 workers on 2 hosts · 0:00:00"


def test_the_rate_is_that_of_the_last_seconds(clock: list[float]) -> None:
    line = Status()
    line.line([0], 1, 1)
    clock[0] += 2
    assert line.line([10], 1, 1) == "step 10 · 5 steps/s · 1 worker · 0:00:02"
    for step in range(11, 41):  # slower from here on
        clock[0] += 1
        shown = line.line([step], 1, 1)
    assert shown.startswith("step 40 · 1 steps/s")
