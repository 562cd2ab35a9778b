"""A background thread: the order of what it runs, errors, and its end."""

from __future__ import annotations

import threading

import pytest

from parallax.comm.threads import BackgroundThread
from parallax.errors import ParallaxError


def test_functions_run_one_after_the_other_and_errors_reach_the_caller() -> None:
    thread, order = BackgroundThread("test"), []
    first = thread.submit(lambda: order.append(1))
    failing = thread.submit(lambda: 1 // 0)
    last = thread.submit(lambda: order.append(2))
    first.result(20)
    with pytest.raises(ZeroDivisionError):
        failing.result(20)
    last.result(20)
    assert order == [1, 2]
    thread.close()


def test_close_finishes_what_was_submitted_and_takes_no_more() -> None:
    thread, release = BackgroundThread("test"), threading.Event()
    waiting = thread.submit(lambda: release.wait(20))
    after = thread.submit(lambda: "done")
    threading.Timer(0.1, release.set).start()
    thread.close()
    assert waiting.result(0)
    assert after.result(0) == "done"
    with pytest.raises(ParallaxError, match="session has ended"):
        thread.submit(lambda: None)
    thread.close()  # Again is fine.


def test_a_function_that_runs_until_the_end_can_see_it() -> None:
    thread = BackgroundThread("test")
    ended = thread.submit(lambda: thread.stopping.wait(20))
    thread.close()
    assert ended.result(0)


def test_a_thread_that_was_never_used_can_be_closed() -> None:
    before = threading.active_count()
    BackgroundThread("test").close()
    assert threading.active_count() == before
