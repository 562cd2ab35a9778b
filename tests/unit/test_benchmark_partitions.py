"""The sweep over numbers of parts as people read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.origin import Origin
from benchmarks.page import write
from benchmarks.partitions import Sweep, table
from benchmarks.results import Results


def test_the_number_that_was_found_stands_beside_the_fastest() -> None:
    fixed = {1: [0.3, 0.2, 0.22], 2: [0.2, 0.21, 0.19], 4: [0.25]}
    result = Sweep("lm", 4, "200mbit", fixed, 3, [0.21], Origin("today", "here", "abc"))
    assert result.best == 2
    assert result.excess == pytest.approx(0.05)
    lines = table(result).splitlines()
    assert lines[0] == "lm, 4 hosts × 200mbit, emulated accelerator"
    assert "| 2 | 200.0 ms [190.0–210.0] ← fastest |" in lines
    assert "| 4 | 250.0 ms [250.0–250.0] |" in lines
    assert "| found while training: 3 | 210.0 ms [210.0–210.0] |" in lines
    assert "the job takes 1.050 of the fastest (goal 1.05)" in lines[-1]
    assert "today UTC, here, Parallax at abc" in lines[-1]


def test_a_sweep_is_kept_and_becomes_part_of_a_page(tmp_path: Path) -> None:
    origin = Origin.now()
    Sweep("lm", 4, "200mbit", {1: [0.3], 16: [0.2]}, 3, [0.21], origin).save(
        tmp_path / "partitions.json"
    )
    found = Results.load(tmp_path)
    assert found.sweep == Sweep("lm", 4, "200mbit", {1: [0.3], 16: [0.2]}, 3, [0.21], origin)
    text = write(found, tmp_path / "page").read_text()
    assert "## Pushes in parts" in text
    assert "| 16 | 200.0 ms [200.0–200.0] ← fastest |" in text
