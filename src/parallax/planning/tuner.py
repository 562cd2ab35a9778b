"""Find the number of partitions of a push while training runs. See [Note: parts] in comm/push.py.

With P partitions a step takes t(P) = θ0 + θ1/P + θ2·P: owners sum one part while the next ones
travel, which hides all but a P-th of the summing, and each part costs a message. Numbers are tried
by doubling, then by halving if doubling was no gain. Then all of them are tried again, because the
speed of a machine varies more from trial to trial than from number to number. The curve through
the medians gives the best number. Among numbers that are equally good within the noise the
smallest is chosen, because parts cost processor time in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch

from parallax.comm.peers import Peers

_FIRST, _MAX = 2, 16
_WARM_UP_STEPS = 30
"""After so many steps lookups are prefetched and tables have found their route."""
_NUM_STEPS, _LEFT_OUT = 10, 2
"""Steps of a trial; the first ones still have messages of the number before."""
_NUM_TRIALS = 3
"""Trials of each number."""
_GAIN = 0.99
"""A number is better if its steps take less than this share of the time."""


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    number: int
    seconds: Mapping[int, float]
    """By number: the median step of its trials. Empty if the number was known before."""


class Tuner:
    """Tries numbers of partitions; rank 0 decides for all workers."""

    def __init__(self, peers: Peers, least: int) -> None:
        self.number = least
        """The number in this step, also while it is on trial."""
        self.is_on = False
        """Whether a search is under way."""
        self._chosen = least
        """The result of the last search."""
        self._peers = peers
        self._least = least
        self._trials: dict[int, list[float]] = {}
        """By number: the seconds of the steps of its trials."""
        self._seconds: list[float] = []

    def start(self) -> None:
        """Start a search with the next step. A search that is under way is dropped."""
        self.is_on = self._peers.num_workers > 1
        self.number = self._chosen
        self._trials, self._seconds = {}, []

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over, so that `begin_trials` is to be called."""
        return self.is_on and not self._trials and len(self._seconds) == _WARM_UP_STEPS

    def begin_trials(self, known: int | None) -> Tuned | None:
        """Begin with the first number. A `known` number, if any, ends the search at once; it must
        be the same on all workers."""
        if known is not None:
            return self._finish(max(known, self._least))
        self.number, self._seconds = max(self._least, _FIRST), []
        self._trials[self.number] = []
        return None

    def end_step(self, seconds: float) -> Tuned | None:
        """Record the duration of a step. Return the result if the search ends with it.
        Collective at the end of a trial."""
        if not self.is_on:
            return None
        self._seconds.append(seconds)
        if self._least >= _MAX and len(self._seconds) == _WARM_UP_STEPS:
            return self._finish(self._least)
        if self._trials and len(self._seconds) == _NUM_STEPS:
            return self._end_trial()
        return None

    def _end_trial(self) -> Tuned | None:
        self._trials.setdefault(self.number, []).extend(self._seconds[_LEFT_OUT:])
        self._seconds = []
        following = next_trial(self._times(), self._least) or self._next_repetition()
        number = best(self._times(), self._least) if following is None else following
        # Clocks differ between workers, and a fit may be rounded differently.
        decision = torch.tensor([number, following is None], dtype=torch.int64)
        where = f"finding the number of parts in step {self._peers.step}"
        number, is_last = self._peers.broadcast(decision, where).tolist()
        if is_last:
            return self._finish(number)
        self.number = number
        return None

    def _next_repetition(self) -> int | None:
        """Return the number that is to be tried again, if any: each in turn."""
        number = min(self._trials, key=lambda each: len(self._trials[each]))
        most = _NUM_TRIALS * (_NUM_STEPS - _LEFT_OUT)
        return number if len(self._trials[number]) < most else None

    def _times(self) -> dict[int, float]:
        return {number: median(seconds) for number, seconds in self._trials.items()}

    def _finish(self, number: int) -> Tuned:
        self.number = self._chosen = number
        self.is_on = False
        return Tuned(number, self._times())


def next_trial(times: Mapping[int, float], least: int) -> int | None:
    """Return the number to try next, if any."""
    numbers = sorted(times)
    low, high = numbers[0], numbers[-1]
    doubled = min(2 * high, _MAX) if high < _MAX else None
    if len(numbers) == 1 or times[high] < _GAIN * times[numbers[-2]]:
        return doubled
    if low // 2 >= least and times[numbers[1]] >= _GAIN * times[low]:
        return low // 2
    return doubled if len(numbers) < 3 else None  # A curve needs three.


def best(times: Mapping[int, float], least: int) -> int:
    """Return the smallest number that takes hardly longer than the minimum of the fitted curve."""
    fitted, taken = fit(times), dict(times)
    if fitted is not None:
        numbers = range(max(least, min(times)), max(times) + 1)
        taken = {number: _at(fitted, number) for number in numbers}
    fastest = min(taken.values())
    return min(number for number in taken if taken[number] <= max(fastest, fastest / _GAIN))


def fit(times: Mapping[int, float]) -> tuple[float, float, float] | None:
    """Return θ0, θ1, θ2 by least squares; None if there are too few trials, or θ1 or θ2 < 0."""
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
