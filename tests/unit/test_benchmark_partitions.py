"""The sweep over numbers of parts as people read it."""

from __future__ import annotations

import pytest

from benchmarks.partitions import Sweep, table


def test_the_number_that_was_found_stands_beside_the_fastest() -> None:
    fixed = {1: [0.3, 0.2, 0.22], 2: [0.2, 0.21, 0.19], 4: [0.25]}
    result = Sweep("lm", 4, "200mbit", fixed, found=3, tuned=[0.21])
    assert result.best == 2
    assert result.excess == pytest.approx(0.05)
    lines = table(result).splitlines()
    assert lines[0] == "lm, 4 hosts × 200mbit, emulated accelerator"
    assert "| 2 | 200.0 ms [190.0–210.0] ← fastest |" in lines
    assert "| 4 | 250.0 ms [250.0–250.0] |" in lines
    assert "| found while training: 3 | 210.0 ms [210.0–210.0] |" in lines
    assert lines[-1] == "With the number it found, the job takes 1.050 of the fastest."
