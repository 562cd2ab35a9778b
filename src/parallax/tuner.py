"""In how many parts a push goes, found while the training runs. See [Note: parts] in collective.py.

With P parts a step takes t(P) = θ0 + θ1/P + θ2·P: owners sum one part while the next ones travel,
which hides all but a P-th of the summing, and each part costs a message. Numbers are tried by
doubling, and by halving if that was no gain; then all of them again, because a machine's speed
changes from one trial to the next by more than numbers differ. The curve through their medians
tells the best. Of numbers that are as good but for the noise of steps the smallest is taken: parts
cost processor time in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import torch

from parallax.comm.peers import Peers

_FIRST, _MAX = 2, 16
_WARM_UP_STEPS = 30
"""Lookups are foreseen and tables have found their route."""
_NUM_STEPS, _LEFT_OUT = 10, 2
"""Of a trial; the first ones belong to the number before as well."""
_NUM_TRIALS = 3
"""Of each number."""
_GAIN = 0.99
"""Of the time that another number takes: less is a gain."""


class Tuner:
    """Tries numbers of parts; rank 0 decides for all."""

    def __init__(
        self,
        peers: Peers,
        least: int,
        kept: Callable[[], int | None],
        settled: Callable[[Mapping[int, float]], None],
    ) -> None:
        """`kept` says what was found before, on all workers alike; it is asked when steps have
        become alike. `settled` is called with what steps took, by number; empty if it was kept.
        """
        self.number = least
        """In this step, be it for a trial."""
        self._in_force = least
        """What was settled on last."""
        self.is_on = False
        """Whether it is looking for a number."""
        self._peers = peers
        self._least = least
        self._kept = kept
        self._settled = settled
        self._trials: dict[int, list[float]] = {}
        """By number: what the steps of its trials took."""
        self._seconds: list[float] = []

    def start(self) -> None:
        """Look for the best number, from the next steps on; again if it was looked for before."""
        self.is_on = self._peers.num_workers > 1
        self.number = self._in_force  # Not what was on trial when this began anew.
        self._trials, self._seconds = {}, []

    def end_step(self, seconds: float) -> None:
        """A step took so long, here."""
        if not self.is_on:
            return
        self._seconds.append(seconds)
        if not self._trials and len(self._seconds) == _WARM_UP_STEPS:
            self._begin()
        elif self._trials and len(self._seconds) == _NUM_STEPS:
            self._note()

    def _begin(self) -> None:
        kept = self._least if self._least >= _MAX else self._kept()
        if kept is not None:
            self._settle(max(kept, self._least))
            return
        self.number, self._seconds = max(self._least, _FIRST), []
        self._trials[self.number] = []

    def _note(self) -> None:
        self._trials.setdefault(self.number, []).extend(self._seconds[_LEFT_OUT:])
        self._seconds = []
        following = next_trial(self._times(), self._least) or self._again()
        number = best(self._times(), self._least) if following is None else following
        # Each has another clock, and a fit may round otherwise on another processor.
        told = torch.tensor([number, following is None], dtype=torch.int64)
        where = f"finding the number of parts in step {self._peers.step}"
        number, is_last = self._peers.broadcast(told, where).tolist()
        if is_last:
            self._settle(number)
        else:
            self.number = number

    def _again(self) -> int | None:
        """The number to try once more, if any: each in turn."""
        number = min(self._trials, key=lambda each: len(self._trials[each]))
        most = _NUM_TRIALS * (_NUM_STEPS - _LEFT_OUT)
        return number if len(self._trials[number]) < most else None

    def _times(self) -> dict[int, float]:
        return {number: median(seconds) for number, seconds in self._trials.items()}

    def _settle(self, number: int) -> None:
        self.number = self._in_force = number
        self.is_on = False
        self._settled(self._times())


def next_trial(times: Mapping[int, float], least: int) -> int | None:
    """The number to try next, if any."""
    numbers = sorted(times)
    low, high = numbers[0], numbers[-1]
    doubled = min(2 * high, _MAX) if high < _MAX else None
    if len(numbers) == 1 or times[high] < _GAIN * times[numbers[-2]]:
        return doubled
    if low // 2 >= least and times[numbers[1]] >= _GAIN * times[low]:
        return low // 2
    return doubled if len(numbers) < 3 else None  # A curve needs three.


def best(times: Mapping[int, float], least: int) -> int:
    """The smallest number that takes hardly longer than the one at which the curve through the
    trials is lowest."""
    fitted, taken = fit(times), dict(times)
    if fitted is not None:
        numbers = range(max(least, min(times)), max(times) + 1)
        taken = {number: _at(fitted, number) for number in numbers}
    fastest = min(taken.values())
    return min(number for number in taken if taken[number] <= max(fastest, fastest / _GAIN))


def fit(times: Mapping[int, float]) -> tuple[float, float, float] | None:
    """θ0, θ1, θ2 by least squares; None if they cannot be told, or make no curve of this kind."""
    if len(times) < 3:
        return None
    numbers = torch.tensor(list(times), dtype=torch.float64)
    columns = torch.stack([torch.ones_like(numbers), 1 / numbers, numbers], 1)
    taken = torch.tensor(list(times.values()), dtype=torch.float64)
    constant, hidden, each = torch.linalg.lstsq(columns, taken[:, None]).solution.flatten().tolist()
    return (constant, hidden, each) if hidden >= 0 and each >= 0 else None


def _at(fitted: tuple[float, float, float], number: int) -> float:
    constant, hidden, each = fitted
    return constant + hidden / number + each * number
