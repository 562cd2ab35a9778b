"""How the workers of a job part from the store where they met."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from parallax.cluster import process_groups


def test_the_worker_that_has_the_store_leaves_last() -> None:
    store, order = HashStore(), []

    def leave() -> None:
        process_groups._part(store, 0, 2)
        order.append(0)

    first = threading.Thread(target=leave)
    first.start()
    first.join(0.3)
    order.append(1)
    process_groups._part(store, 1, 2)
    first.join(process_groups._PART_SECONDS)
    assert order == [1, 0]


def test_it_does_not_wait_for_one_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "_PART_SECONDS", 0.1)
    process_groups._part(HashStore(), 0, 2)
