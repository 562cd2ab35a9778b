"""Out-of-band pulls: rows of all owners in one answer, and owners that do not answer."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from parallax.comm.out_of_band import OutOfBandPulls
from parallax.errors import WaitTimeoutError


class Rows:
    """An owner whose rows are ten times its rank plus their place."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def owned_rows(self, table: str, places: Tensor) -> Tensor:
        assert table == "words"
        return (10.0 * self._rank + places).unsqueeze(1)


def test_rows_come_from_all_owners_in_order() -> None:
    store = HashStore()
    workers = [OutOfBandPulls(store, rank, 20) for rank in range(3)]
    workers[2].answer_requests()  # There is nothing to serve from yet.
    for rank, worker in enumerate(workers):
        worker.serve_from(Rows(rank))
    done = threading.Event()

    def answer() -> None:
        while not done.wait(0.01):
            workers[1].answer_requests()
            workers[2].answer_requests()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        for _ in range(2):
            rows = workers[0].pull("words", [1, 2, 1], torch.tensor([4, 0, 3, 2]))
            assert rows.tolist() == [[4.0], [10.0], [13.0], [22.0]]
    finally:
        done.set()
        thread.join()


def test_an_owner_that_does_not_answer_is_named() -> None:
    mine = OutOfBandPulls(HashStore(), 0, 0.1)
    mine.serve_from(Rows(0))
    with pytest.raises(WaitTimeoutError, match="rows of 'words' from worker 1"):
        mine.pull("words", [1, 1], torch.tensor([0, 0]))
