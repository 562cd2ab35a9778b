"""Turns → the figures that tables and plots show."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.contest import Contest, Result
from benchmarks.engines import ALONE, ENGINES, OURS
from benchmarks.limits import limit_seconds, wire_seconds


@dataclass(frozen=True)
class Figure:
    """One engine in one setting: medians over its turns, all of a step."""

    engine: str
    seconds: float
    fastest: float
    slowest: float
    ratio: float
    """To Parallax's turns just before; more than 1 is slower."""
    cpu_seconds: float
    wire_bytes: float
    """Of the direction with more of them, at the host with the most."""
    limit: float
    split: dict[str, float]
    loss: float
    spans: dict[str, float]
    """Parts of the step as the first worker measured them; medians."""
    versions: dict[str, str]

    @property
    def title(self) -> str:
        return ENGINES[self.engine].title


PARTS = ("compute", "update", "exchange", "wait")


def figures_of(contest: Contest) -> list[Figure]:
    """Of each engine once, in the order of its setting; a later sitting's repeats are left out."""
    found: dict[str, Figure] = {}
    results = [each for sitting in contest.sittings for each in sitting if each.absent is None]
    alone = next((each for each in results if each.engine == ALONE), None)
    for sitting in contest.sittings:
        taking_part = {each.engine: each for each in sitting if each.absent is None}
        for name, result in taking_part.items():
            if name not in found:
                found[name] = _figure(result, taking_part[OURS], alone, contest.setting.rate)
    return [found[name] for name in contest.setting.engines if name in found]


def absent_of(contest: Contest) -> dict[str, str]:
    """Engines without figures, and why."""
    results = [each for sitting in contest.sittings for each in sitting]
    return {each.engine: each.absent for each in results if each.absent is not None}


def _figure(result: Result, ours: Result, alone: Result | None, rate: str | None) -> Figure:
    seconds = _all(result, "seconds")
    # Turns that followed each other are compared with each other.
    ratios = [b / a for a, b in zip(_all(ours, "seconds"), seconds, strict=True)]
    moved = max(median(_all(result, side)) for side in ("sent_bytes", "received_bytes"))
    compute = median(_all(alone, "seconds")) if alone else 0.0
    return Figure(
        engine=result.engine,
        seconds=median(seconds),
        fastest=min(seconds),
        slowest=max(seconds),
        ratio=median(ratios),
        cpu_seconds=median(_all(result, "cpu_seconds")),
        wire_bytes=moved,
        limit=limit_seconds(compute, moved, rate),
        split=_split(median(seconds), moved, alone, rate),
        loss=result.turns[-1].loss,
        spans=_spans(result),
        versions=result.versions,
    )


def _split(
    seconds: float, moved: float, alone: Result | None, rate: str | None
) -> dict[str, float]:
    """Where a step's time goes, told the same way for engines that show nothing of themselves.

    Computing and updating take what they take without an exchange; the exchange takes what its
    bytes need on the link; all the rest is waiting: for messages, for others, for a processor.
    What overlaps is taken off the exchange, so the parts add up to the step.
    """
    update = median(turn.spans["update"] for turn in alone.turns) if alone else 0.0
    compute = median(_all(alone, "seconds")) - update if alone else 0.0
    own = min(compute + update, seconds)
    exchange = min(wire_seconds(moved, rate), seconds - own)
    update = min(update, own)
    return {
        "compute": own - update,
        "update": update,
        "exchange": exchange,
        "wait": seconds - own - exchange,
    }


def _spans(result: Result) -> dict[str, float]:
    names = result.turns[0].spans
    return {name: median(turn.spans.get(name, 0.0) for turn in result.turns) for name in names}


def _all(result: Result, name: str) -> list[float]:
    return [getattr(turn, name) for turn in result.turns]
