"""Which failure of a job came first, and what is said of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from parallax.errors import PeerError, WaitTimeoutError
from parallax.launch import failure
from parallax.launch.failure import Failure
from parallax.launch.host.rundir import RunDirectory


def caught(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """`error` as it is when it was raised from `cause`."""
    try:
        raise error from cause
    except BaseException as raised:
        return raised


def record(rank: int, time_seconds: float, *, secondary: bool = False) -> Failure:
    return Failure(rank=rank, exit_code=1, time_seconds=time_seconds, secondary=secondary)


def test_a_record_survives_the_directory(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    error = caught(ValueError("bad \udcff"))
    written = failure.from_exception(3, error, error.__traceback__)
    failure.write(directory, 3, written)
    assert failure.read(directory, 4) == [written]
    assert failure.read(directory, 3) == []


def test_an_exception_is_recorded_with_its_traceback() -> None:
    error = caught(ValueError("first line\nsecond line"))
    found = failure.from_exception(2, error, error.__traceback__)
    assert (found.rank, found.exit_code, found.secondary, found.step) == (2, 1, False, None)
    assert "in caught" in found.traceback
    assert found.describe() == "worker 2 failed with exit code 1 (ValueError: first line)"


def test_a_step_is_named_where_the_error_knows_it() -> None:
    error = PeerError("x")
    error.step = 12  # type: ignore[attr-defined]
    assert "worker 0 failed at step 12 with" in failure.from_exception(0, error, None).describe()


def test_what_another_worker_caused_is_secondary() -> None:
    lost = WaitTimeoutError("worker 1 did not answer")
    for error in (lost, caught(RuntimeError("x"), cause=lost)):
        assert failure.from_exception(0, error, None).secondary
    assert not failure.from_exception(0, caught(RuntimeError("x")), None).secondary


def test_a_chain_of_causes_that_is_a_circle_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__context__, second.__context__ = second, first
    assert not failure.from_exception(0, first, None).secondary


def test_a_syntax_error_is_named_by_its_last_line() -> None:
    with pytest.raises(SyntaxError) as raised:
        compile("a b", "x.py", "exec")
    assert failure.from_exception(0, raised.value, None).error.startswith("SyntaxError: ")


def test_the_earliest_record_is_first_and_secondary_ones_are_not() -> None:
    records = [record(0, 3.0), record(1, 1.0, secondary=True), record(2, 2.0)]
    assert [f.rank for f in failure.in_order(records, [])] == [2, 0, 1]


def test_a_worker_that_was_killed_comes_before_those_who_missed_it() -> None:
    deaths = [
        failure.from_death(0, 1, 101),
        failure.from_death(1, -signal.SIGKILL, 101),
        failure.from_death(2, -signal.SIGTERM, 100),
    ]
    order = failure.in_order([record(0, 100.9)], deaths)
    assert [f.rank for f in order] == [1, 0, 2]
    assert order[0].exit_code == 137


def test_an_exception_long_before_a_death_is_first() -> None:
    order = failure.in_order([record(0, 95.0)], [failure.from_death(1, -signal.SIGABRT, 100)])
    assert [f.rank for f in order] == [0, 1]


def test_the_report_ends_with_the_traceback_of_the_first() -> None:
    error = caught(ValueError("bad"))
    first = failure.from_exception(2, error, error.__traceback__)
    others = [record(3, 2.0), record(0, 3.0), failure.from_death(1, -signal.SIGTERM, 9)]
    lines = failure.report([first, *others]).splitlines()
    assert lines[0] == (
        "parallax: worker 2 failed with exit code 1 (ValueError: bad); "
        "workers 0, 3 failed after it. Its traceback:"
    )
    assert lines[-1] == "ValueError: bad"


def test_a_signal_is_named() -> None:
    killed = failure.from_death(1, -signal.SIGKILL, 0)
    assert "worker 1 was ended by signal 9 (SIGKILL)" in failure.report([killed])
    crashed = failure.from_death(1, -signal.SIGSEGV, 0)
    assert failure.report([crashed]) == "parallax: worker 1 was ended by signal 11 (SIGSEGV).\n"
    assert "signal 50" in failure.from_death(1, -50, 0).describe()
