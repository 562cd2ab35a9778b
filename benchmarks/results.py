"""A folder of results: what each measurement keeps there, and the page is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import predictions, suite
from benchmarks.contest import Contest
from benchmarks.convergence import Outcome
from benchmarks.partitions import Sweep
from benchmarks.predictions import Prediction

CONVERGENCE, FORECASTS, PARTITIONS = "convergence.json", "forecasts.json", "partitions.json"
"""All other files are contests."""


@dataclass(frozen=True)
class Results:
    """What of a folder there is."""

    contests: list[Contest]
    outcome: Outcome | None = None
    forecasts: list[Prediction] = field(default_factory=list)
    sweep: Sweep | None = None

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Contests are in the order of the suite; others after them, by name."""
        known = [setting.name for setting in suite.full()]
        others = (CONVERGENCE, FORECASTS, PARTITIONS)
        paths = [path for path in folder.glob("*.json") if path.name not in others]
        paths.sort(key=lambda path: (_place(known, path.stem), path.stem))
        race, sweep = folder / CONVERGENCE, folder / PARTITIONS
        return cls(
            [Contest.load(path) for path in paths],
            Outcome.load(race) if race.exists() else None,
            predictions.kept(folder / FORECASTS),
            Sweep.load(sweep) if sweep.exists() else None,
        )


def _place(known: list[str], name: str) -> int:
    return known.index(name) if name in known else len(known)
