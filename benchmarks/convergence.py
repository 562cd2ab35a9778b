"""Real text to a fixed perplexity: the same steps as DDP, less time.

Both engines train in turns on the same hosts, and after each turn the perplexity of held-out text
is taken, outside the time that counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.contest import FIRST_PORT, set_links
from benchmarks.crew import LOGS, Crew
from benchmarks.engines import Engine
from benchmarks.origin import Origin
from benchmarks.testbed import Testbed
from benchmarks.workloads import TEXT
from benchmarks.workloads.text import HIDDEN, MAX_WORDS, NUM_SAMPLES, WIDTH, WINDOW, WINDOWS

OURS = "Parallax"
ENGINES = {
    OURS: Engine("Parallax on text", "text", {"engine": "parallax"}),
    "DDP sparse": Engine("DDP sparse on text", "text", {"engine": "ddp-sparse"}),
}


@dataclass(frozen=True)
class Race:
    """To which perplexity, and where."""

    target: float = 700.0
    num_hosts: int = 4
    rate: str = "200mbit"
    turn_steps: int = 25
    max_steps: int = 1500


@dataclass
class Track:
    """Of one engine, after each turn: steps, seconds of training, perplexity."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    perplexities: list[float] = field(default_factory=list)

    def add(self, steps: int, seconds: float, perplexity: float) -> None:
        self.steps.append(steps + (self.steps[-1] if self.steps else 0))
        self.seconds.append(seconds + (self.seconds[-1] if self.seconds else 0.0))
        self.perplexities.append(perplexity)

    def has_reached(self, race: Race) -> bool:
        return bool(self.steps) and self.perplexities[-1] <= race.target

    def is_over(self, race: Race) -> bool:
        return self.has_reached(race) or (bool(self.steps) and self.steps[-1] >= race.max_steps)


@dataclass
class Outcome:
    """What a race gave."""

    race: Race
    tracks: dict[str, Track]
    origin: Origin

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Outcome:
        facts = json.loads(path.read_text())
        tracks = {name: Track(**track) for name, track in facts["tracks"].items()}
        return cls(Race(**facts["race"]), tracks, Origin(**facts["origin"]))


def run(race: Race, progress: Callable[[str], None]) -> Outcome:
    origin = Origin.now()
    tracks = {name: Track() for name in ENGINES}
    about = {"workload": TEXT, "is_emulated": False}
    with ExitStack() as stack:
        bed = stack.enter_context(Testbed(race.num_hosts, ssh="off"))
        crews = {}
        for place, (name, engine) in enumerate(ENGINES.items()):
            crews[name] = stack.enter_context(Crew(bed, engine, about, LOGS / "convergence"))
            crews[name].start(FIRST_PORT + place)
        set_links(bed, race.rate)
        while not all(track.is_over(race) for track in tracks.values()):
            for name, track in tracks.items():
                if not track.is_over(race):
                    turn = crews[name].take_turn(race.turn_steps)
                    seconds = turn.spans["train"] * race.turn_steps
                    track.add(race.turn_steps, seconds, turn.loss)
            progress(_standing(tracks))
    return Outcome(race, tracks, origin)


def _standing(tracks: dict[str, Track]) -> str:
    parts = [
        f"{name} step {track.steps[-1]}, {track.perplexities[-1]:,.0f}, {track.seconds[-1]:,.0f} s"
        for name, track in tracks.items()
    ]
    return "; ".join(parts)


def table(outcome: Outcome) -> str:
    race = outcome.race
    lines = [
        f"The model of `examples/lm1b.py` on real text to a perplexity of {race.target:g}, "
        f"{race.num_hosts} hosts × {race.rate}, real compute ({outcome.origin}). "
        f"Tables of {MAX_WORDS:,} × {WIDTH}, a cell of {HIDDEN}, "
        f"{NUM_SAMPLES:,} candidates, {WINDOWS} × {WINDOW} words a worker:",
        "",
        "| engine | steps | perplexity | seconds | Parallax = 1 |",
        "|---|---|---|---|---|",
    ]
    ours = outcome.tracks[OURS]
    for name, track in outcome.tracks.items():
        reached = f"{track.perplexities[-1]:,.1f}"
        ratio = f"{track.seconds[-1] / ours.seconds[-1]:.2f} ×"
        if not (track.has_reached(race) and ours.has_reached(race)):
            ratio = "–"
        if not track.has_reached(race):
            reached += " (not reached)"
        columns = [name, f"{track.steps[-1]}", reached, f"{track.seconds[-1]:,.1f}", ratio]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join([*lines, "", _agreement(outcome)])


def _agreement(outcome: Outcome) -> str:
    """How far the engines' perplexities after the same steps are apart."""
    ours, *others = outcome.tracks.values()
    pairs = [
        pair for each in others for pair in zip(ours.perplexities, each.perplexities, strict=False)
    ]
    apart = max(abs(theirs / mine - 1) for mine, theirs in pairs)
    return f"After the same steps the perplexities differ by {100 * apart:.2g}% at most."
