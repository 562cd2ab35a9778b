"""The loop that the examples share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.examples import load

loop = load("loop")


class Loader:
    """Hands out numbers, and knows how many."""

    def __init__(self, length: int) -> None:
        self.length, self.num_drawn = length, 0

    def __iter__(self):
        for _ in range(self.length):
            self.num_drawn += 1
            yield self.num_drawn


@pytest.mark.parametrize(("rank", "done", "expected"), [(0, 0, 7), (1, 0, 7), (1, 4, 3), (0, 9, 0)])
def test_steps_go_over_epochs_and_draw_no_batch_too_many(
    rank: int, done: int, expected: int
) -> None:
    loader = Loader(3)
    batches = list(loop.steps(SimpleNamespace(rank=rank, step=done), loader, 7, "a title"))
    assert batches == list(range(1, expected + 1))
    assert loader.num_drawn == expected


def test_too_little_data_ends_with_a_word() -> None:
    with pytest.raises(SystemExit, match="smaller --batch-size"):
        list(loop.steps(SimpleNamespace(rank=1, step=0), Loader(0), 7, "a title"))
