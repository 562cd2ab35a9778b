"""The step in a file: what is there at any moment, and files that cannot be used."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import pytest

from parallax.cluster.step_file import StepFile


def test_the_number_is_in_the_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "step"
    file.write_bytes(bytes(8))
    step_file = StepFile(str(file))
    for step in (0, 1, 2**40):
        step_file.write(step)
        assert struct.unpack("<q", file.read_bytes()) == (step,)
    step_file.close()
    step_file.write(7)
    assert struct.unpack("<q", file.read_bytes()) == (2**40,)


def test_without_a_path_nothing_is_written() -> None:
    step_file = StepFile(None)
    step_file.write(1)
    step_file.close()


@pytest.mark.parametrize("size_bytes", [None, 0, 7])
def test_a_file_that_cannot_be_used_is_a_warning(
    size_bytes: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "step"
    if size_bytes is not None:
        file.write_bytes(bytes(size_bytes))
    with caplog.at_level(logging.WARNING, "parallax"):
        StepFile(str(file)).write(1)
    assert "cannot show the step" in caplog.text
