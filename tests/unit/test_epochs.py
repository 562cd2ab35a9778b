"""Which epoch a script is in, and whether a loader's batches are trained on."""

from __future__ import annotations

import logging

import pytest

from parallax.data import Epochs, LoaderUsage
from parallax.errors import ConfigError


def test_epochs_go_on_from_the_restored_one(caplog: pytest.LogCaptureFixture) -> None:
    epochs = Epochs()
    assert list(epochs.up_to(3)) == [0, 1, 2]
    assert list(epochs.up_to(5)) == [3, 4]
    epochs.restore(2)
    assert list(epochs.up_to(4)) == [2, 3]
    assert not caplog.text
    with caplog.at_level(logging.WARNING, "parallax"):
        assert list(epochs.up_to(4)) == []
    assert "4 epochs are done already" in caplog.text
    for wrong in (-1, 2.5, "3"):
        with pytest.raises(ConfigError, match="how many epochs"):
            epochs.up_to(wrong)  # type: ignore[arg-type]


def test_a_load_inside_the_loop_says_which_epoch_comes() -> None:
    epochs, seen = Epochs(), []
    for epoch in epochs.up_to(4):
        seen.append(epoch)
        if seen == [0, 1, 2]:
            epochs.restore(1)
    assert seen == [0, 1, 2, 1, 2, 3]


class Training:
    """The usage of a loader, and the steps of a script."""

    def __init__(self) -> None:
        self.step = 0
        self.saves: list[int] = []
        self.epochs = Epochs()
        self.usage = LoaderUsage(self.epochs, self, self)

    def before_fetch(self) -> None: ...

    def before_batch(self) -> None:
        self.saves.append(self.step)

    def run(self, *steps: int) -> None:
        """A pass: how many steps are completed with each batch."""
        self.usage.begin()
        for number in steps:
            self.usage.before_fetch(0)
            self.usage.before_batch()
            self.step += number
        self.usage.leave()


def test_a_batch_after_a_step_is_a_save_point() -> None:
    training = Training()
    training.run(1, 1, 1)
    assert training.saves == [1, 2]
    training.run(1)  # the first batch of the next epoch, after the last step of this
    assert training.saves == [1, 2, 3]


def test_in_accumulation_only_the_batch_after_a_step_is() -> None:
    training = Training()
    training.run(0, 0, 1, 0, 0, 2, 0)
    assert training.saves == [1, 3]
    training.run(1)
    assert training.saves == [1, 3], "a gradient is waiting"


def test_an_evaluation_has_no_save_points() -> None:
    training = Training()
    for _ in range(3):
        training.run(0, 0)
        training.step += 5
    assert not training.saves
    assert training.usage.is_over
    assert not training.usage.is_left


def test_a_pass_is_left_in_its_epoch() -> None:
    training = Training()
    for _ in training.epochs.up_to(2):
        assert not training.epochs.is_left
        training.run(1)
        assert training.usage.is_left
        assert training.epochs.is_left
        training.usage.begin()
        assert not training.usage.is_left
        training.usage.leave()
    assert not training.epochs.is_left


def test_a_pass_that_was_over_is_not_repeated_in_its_epoch() -> None:
    training = Training()
    training.epochs.restore(1)
    training.usage.restore(is_left=True)
    for epoch in training.epochs.up_to(3):
        assert training.usage.take_done() is (epoch == 1)
        assert not training.usage.take_done()
