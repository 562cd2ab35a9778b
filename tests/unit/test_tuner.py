"""The number of parts: which numbers are tried, and which is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallax.comm.peers import Peers
from parallax.observability.ledger import Ledger
from parallax.planning.tuner import Tuned, Tuner, best, fit, next_trial


def curve(constant: float, hidden: float, each: float) -> Callable[[int], float]:
    return lambda number: constant + hidden / number + each * number


def tried(took: Callable[[int], float], least: int = 1) -> dict[int, float]:
    """All trials from the first on."""
    number: int | None = max(2, least)
    times: dict[int, float] = {}
    while number is not None:
        times[number] = took(number)
        number = next_trial(times, least)
    return times


@pytest.mark.parametrize(
    ("hidden", "each", "least", "numbers"),
    [
        (0.0, 1.0, 1, [2, 4, 1]),  # Parts only cost.
        (4.0, 1.0, 1, [2, 4, 1]),
        (36.0, 1.0, 1, [2, 4, 8]),
        (400.0, 1.0, 1, [2, 4, 8, 16]),
        (100.0, 1.0, 3, [3, 6, 12, 16]),
        (1.0, 0.0, 1, [2, 4, 1]),  # Hardly a gain.
        (0.0, 1.0, 5, [5, 10, 16]),  # Not below what the user wants.
        (0.0, 1.0, 20, [20]),
        (900.0, 0.0, 1, [2, 4, 8, 16]),
    ],
)
def test_numbers_double_while_that_gains_and_halve_otherwise(
    hidden: float, each: float, least: int, numbers: list[int]
) -> None:
    assert list(tried(curve(100, hidden, each), least)) == numbers


@pytest.mark.parametrize("hidden", [0.0, 1.0, 3.0, 10.0, 36.0, 200.0])
@pytest.mark.parametrize("least", [1, 2, 5])
def test_what_is_taken_is_the_smallest_of_the_best(hidden: float, least: int) -> None:
    took = curve(100, hidden, 1.0)
    found = best(tried(took, least), least)
    fastest = min(took(number) for number in range(least, 17))
    assert found >= least
    assert took(found) <= fastest / 0.99
    assert found == least or took(found - 1) > fastest / 0.99


def test_the_curve_is_that_of_least_squares() -> None:
    times = {1: 14.2, 2: 12.1, 4: 12.4, 8: 15.1}
    found = fit(times)
    assert found is not None
    off = sum((curve(*found)(number) - taken) ** 2 for number, taken in times.items())
    for place in range(3):
        for change in (-0.01, 0.01):
            other = [value + change * (i == place) for i, value in enumerate(found)]
            assert off < sum((curve(*other)(n) - taken) ** 2 for n, taken in times.items())


def test_where_there_is_no_such_curve_trials_decide() -> None:
    assert fit({1: 5.0, 2: 6.0}) is None
    assert fit({1: 1.0, 2: 3.0, 4: 3.0}) is None  # It falls off on the wrong side.
    assert best({1: 1.0, 2: 3.0, 4: 3.0}, 1) == 1
    assert best({5: 3.0, 10: 2.0}, 5) == 10
    assert best({2: 3.01, 4: 3.0, 8: 2.99, 16: 2.98}, 1) == 2


def end_step(tuner: Tuner, seconds: float, known: int | None = None) -> Tuned | None:
    """A step; `known` is what an earlier run has found."""
    found = tuner.end_step(seconds)
    return tuner.begin_trials(known) if tuner.is_warm else found


def of_two(least: int = 1) -> Tuner:
    """That of the first of two workers."""
    peers = Peers(0, 2, ledger=Ledger(), timeout_seconds=1)
    peers.broadcast = lambda values, where: values  # type: ignore[method-assign]
    tuner = Tuner(peers, least)
    tuner.start()
    return tuner


def test_beginning_anew_takes_back_what_is_on_trial() -> None:
    tuner = of_two()
    for _ in range(45):
        end_step(tuner, 1.0)
    assert tuner.number == 4
    tuner.start()
    assert tuner.number == 1


def test_where_one_number_is_left_none_is_tried() -> None:
    tuner = of_two(least=16)
    for _ in range(30):
        assert tuner.is_on
        end_step(tuner, 1.0)
    assert not tuner.is_on
    assert tuner.number == 16


def test_a_slow_trial_decides_nothing() -> None:
    tuner = of_two()
    took = curve(1.0, 0.9, 0.1)
    for step in range(1000):
        # Others have the machine: while the first number is tried, and for parts of other trials.
        end_step(tuner, took(tuner.number) * (3 if 30 <= step < 45 or step % 10 < 3 else 1))
    assert not tuner.is_on
    assert tuner.number == 3


def test_a_tuner_settles_after_its_trials() -> None:
    peers = Peers(0, 1, ledger=Ledger(), timeout_seconds=1)
    tuner = Tuner(peers, 1)
    tuner.start()
    end_step(tuner, 1.0)
    assert tuner.number == 1  # One worker has nothing to find.
    peers.num_workers = 2
    peers.broadcast = lambda values, where: values  # type: ignore[method-assign]
    tuner.start()
    took, numbers, found = curve(1.0, 0.9, 0.1), [], []
    for _ in range(30 + 9 * 10):
        assert tuner.is_on
        numbers.append(tuner.number)
        found.append(end_step(tuner, took(tuner.number)))
    assert not tuner.is_on
    assert numbers[30::10] == [2, 4, 8] * 3  # A slow time of the machine is not one number's.
    assert tuner.number == 3
    assert found[:-1] == [None] * (len(found) - 1)
    assert found[-1] == Tuned(3, {number: pytest.approx(took(number)) for number in (2, 4, 8)})
    tuner.start()
    found = []
    for _ in range(30):
        assert tuner.is_on
        found.append(end_step(tuner, 1.0, known=7))
    assert tuner.number == 7
    assert found == [None] * 29 + [Tuned(7, {})]
    assert not tuner.is_on
