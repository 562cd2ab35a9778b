"""Forecasts beside what was seen: kept by setting, and told with their goals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks import predictions
from benchmarks.origin import Origin
from benchmarks.page import write
from benchmarks.predictions import Prediction
from benchmarks.results import Results

LM = Prediction("lm", 4, 0.22, 0.2, 4.9e6, 5e6, 0.001, Origin("today", "here", "abc"))
NMT = replace(LM, workload="nmt", predicted_seconds=0.17, predicted_bytes=5.05e6)


def test_forecasts_are_kept_by_setting_and_become_part_of_a_page(tmp_path: Path) -> None:
    path = tmp_path / "forecasts.json"
    for found in (NMT, replace(LM, num_hosts=8), replace(LM, seconds=9.0), LM):
        predictions.keep(found, path)
    results = Results.load(tmp_path)
    assert results.forecasts == [LM, replace(LM, num_hosts=8), NMT]
    text = write(results, tmp_path / "page").read_text()
    assert "## Forecasts" in text
    assert "| `lm` | 4 | 200.0 ms | 220.0 ms | +10% |" in text


def test_the_worst_forecast_stands_beside_the_goal() -> None:
    text = predictions.table([LM, NMT])
    assert "Steps are at most 15% off (goal 20%), bytes 2.0% (5%)" in text
    assert "at most 0.50% of a step (1%)" in text
    assert text.count("today UTC, here, Parallax at abc") == 1
