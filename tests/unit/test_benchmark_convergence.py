"""The race to a perplexity: its tracks, its table and its page; nothing is trained."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.convergence import Outcome, Race, Track, table
from benchmarks.origin import Origin
from benchmarks.page import write
from benchmarks.results import Results
from benchmarks.workloads.text import WINDOWS, Text


def track(*turns: tuple[int, float, float]) -> Track:
    made = Track()
    for turn in turns:
        made.add(*turn)
    return made


def outcome(theirs: float = 690.0) -> Outcome:
    tracks = {
        "Parallax": track((25, 2.0, 900.0), (25, 3.0, 691.0)),
        "DDP sparse": track((25, 4.0, 900.9), (25, 6.0, theirs)),
    }
    return Outcome(Race(target=700.0, max_steps=50), tracks, Origin("today", "here", "abc"))


def test_a_track_counts_on_and_is_over_at_the_target_or_the_last_step() -> None:
    race = Race(target=700.0, max_steps=75)
    made = track((25, 2.0, 900.0), (25, 3.0, 701.0))
    assert (made.steps, made.seconds) == ([25, 50], [2.0, 5.0])
    assert not made.is_over(race)
    assert track((25, 2.0, 700.0)).has_reached(race)
    last = track((75, 2.0, 701.0))
    assert last.is_over(race)
    assert not last.has_reached(race)
    assert not Track().is_over(race)


def test_an_outcome_is_kept_and_becomes_part_of_a_page(tmp_path: Path) -> None:
    outcome().save(tmp_path / "convergence.json")
    kept = Outcome.load(tmp_path / "convergence.json")
    assert kept == outcome()
    text = write(Results([], kept), tmp_path / "page").read_text()
    assert "## Convergence" in text
    assert (tmp_path / "page" / "convergence.png").stat().st_size > 10_000


def test_the_table_has_seconds_to_the_target_and_how_well_engines_agree() -> None:
    text = table(outcome())
    assert "| Parallax | 50 | 691.0 | 5.0 | 1.00 × |" in text
    assert "| DDP sparse | 50 | 690.0 | 10.0 | 2.00 × |" in text
    assert "differ by 0.14% at most" in text


def test_a_race_that_was_not_won_has_no_ratio() -> None:
    text = table(outcome(theirs=710.0))
    assert "| DDP sparse | 50 | 710.0 (not reached) | 10.0 | – |" in text


def test_batches_cut_by_hand_are_those_of_the_loader() -> None:
    text = Text()
    text.windows = torch.arange(5 * WINDOWS + 5)[:, None]
    alone = text.batches(0, 1)
    for (windows,) in [*text.loader(), *text.loader()]:
        assert torch.equal(next(alone)[0], windows)
    of_both = zip(text.batches(0, 2), text.batches(1, 2), strict=True)
    for start in (0, 2 * WINDOWS, 0):  # The last window of an epoch is one worker's only.
        (first,), (second,) = next(of_both)
        assert torch.equal(torch.cat([first, second]), text.windows[start:][: 2 * WINDOWS])
