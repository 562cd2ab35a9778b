"""The loop that the examples share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.examples import EXAMPLES, load

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


def test_worker_0_shows_a_bar_and_the_others_none(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        assert capsys.readouterr().out == ""
        list(loop.steps(SimpleNamespace(rank=rank, step=0), Loader(3), 7, "a title"))
    shown = capsys.readouterr().out
    assert "a title: 100%" in shown
    assert "7/7" in shown


SCRIPTS = "lm1b nmt resnet50 inception_v3 dlrm skip_thoughts word2vec linear".split()


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_an_ordinary_script_with_two_lines(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < 200
    trains = text + (EXAMPLES / "images.py").read_text() * ("from images import" in text)
    assert trains.count("parallax.parallelize(") == 1
    assert trains.count("session.shard(") == 1
    assert " steps(" in trains
    assert '"--steps"' in trains


def test_too_little_data_ends_with_a_word() -> None:
    with pytest.raises(SystemExit, match="smaller --batch-size"):
        list(loop.steps(SimpleNamespace(rank=1, step=0), Loader(0), 7, "a title"))
