"""Heartbeats: they go on whatever happens in their thread, until the store is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import DistNetworkError, HashStore, Store

from parallax.cluster import heartbeats
from parallax.cluster.heartbeats import Heartbeats


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.01)


class Flaky(HashStore):
    """A store that raises when it is told to."""

    error: Exception | None = None

    def set(self, key: str, value: str) -> None:
        if self.error is not None:
            raise self.error
        super().set(key, value)


class Unprintable:
    def __str__(self) -> str:
        raise KeyError("no words for this")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def beat(store: Store) -> int:
    other = Heartbeats(store, 1, 2)
    other.close()
    (status,) = other.statuses()
    return status.beat


def test_beats_go_on_after_an_error_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    class Server:
        def answer_requests(self) -> None:
            calls.append(1)
            raise KeyError("a table that nobody knows")

    store = HashStore()
    mine = Heartbeats(store, 0, 2, Server())
    wait_until(lambda: len(calls) > 3)
    before = beat(store)
    wait_until(lambda: beat(store) > before)
    mine.close()
    (record,) = caplog.records
    assert "worker 0 could not answer the other workers" in record.message
    assert "a table that nobody knows" in caplog.text


@pytest.mark.parametrize("what", ["words", "a timeout"])
def test_beats_go_on_after_an_error_of_posting(what: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Flaky()
    mine = Heartbeats(store, 0, 2)
    if what == "words":
        mine.begin_wait(Unprintable())
    else:
        store.error = RuntimeError("wait timeout")
    wait_until(lambda: bool(caplog.records))
    mine.begin_wait("a lookup")
    store.error = None
    before = beat(store)
    wait_until(lambda: beat(store) > before)
    mine.close()
    (record,) = caplog.records
    assert "worker 0 could not post that it is alive" in record.message


@pytest.mark.parametrize("error", [DistNetworkError("Broken pipe"), ConnectionResetError()])
def test_a_store_that_is_gone_ends_the_thread(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = Flaky()
    before = set(threading.enumerate())
    mine = Heartbeats(store, 0, 2)
    (thread,) = set(threading.enumerate()) - before
    store.error = error
    wait_until(lambda: not thread.is_alive())
    assert mine.silent_workers() == [0]
    assert not caplog.records
    mine.close()
