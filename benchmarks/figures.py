"""Turns → the figures that tables and plots show."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from benchmarks.contest import Contest, Result
from benchmarks.engines import ALONE, ENGINES, OURS
from benchmarks.limits import limit_seconds, wire_seconds
from benchmarks.workloads import by_name


@dataclass(frozen=True)
class Figure:
    """One engine in one setting: medians over its turns, all of a step."""

    engine: str
    seconds: float
    fastest: float
    slowest: float
    ratio: float
    """To Parallax's turns just before and after; more than 1 is slower."""
    cpu_seconds: float
    wire_bytes: float
    """Of the direction with more of them, at the host with the most."""
    limit: float
    is_wire_only: bool
    """Whether the limit knows nothing of the computing."""
    split: dict[str, float]
    loss: float | None
    """After the steps of the warm-up."""
    spans: dict[str, float]
    """Parts of the step as the first worker measured them; medians."""
    versions: dict[str, str]

    @property
    def title(self) -> str:
        return ENGINES[self.engine].title


PARTS = ("compute", "update", "exchange", "wait")


class Own(NamedTuple):
    """What a step takes without any exchange."""

    compute: float
    update: float


def figures_of(contest: Contest) -> list[Figure]:
    """Of each engine once, in the order of its setting; a later sitting's repeats are left out."""
    found: dict[str, Figure] = {}
    own = _own(contest)
    for sitting in contest.sittings:
        taking_part = {each.engine: each for each in sitting if each.absent is None}
        for name, result in taking_part.items():
            if name not in found:
                found[name] = _figure(result, taking_part[OURS], own, contest.setting.rate)
    return [found[name] for name in contest.setting.engines if name in found]


def _own(contest: Contest) -> Own | None:
    """As the engine without exchange measured it; else what the emulated accelerator takes."""
    results = [each for sitting in contest.sittings for each in sitting if each.absent is None]
    alone = next((each for each in results if each.engine == ALONE), None)
    if alone is not None:
        update = _spans(alone)["update"]
        return Own(median(_all(alone, "seconds")) - update, update)
    if contest.setting.is_emulated:
        return Own(by_name(contest.setting.workload).compute_ms / 1000, 0.0)
    return None


def absent_of(contest: Contest) -> dict[str, str]:
    """Engines without figures, and why."""
    results = [each for sitting in contest.sittings for each in sitting]
    return {each.engine: each.absent for each in results if each.absent is not None}


def _figure(result: Result, ours: Result, own: Own | None, rate: str | None) -> Figure:
    seconds = _all(result, "seconds")
    moved = max(median(_all(result, side)) for side in ("sent_bytes", "received_bytes"))
    spans = _spans(result)
    compute, update = own or (0.0, 0.0)
    if not ENGINES[result.engine].waits_in_update:
        update = spans.get("update", update)
    return Figure(
        engine=result.engine,
        seconds=median(seconds),
        fastest=min(seconds),
        slowest=max(seconds),
        ratio=1.0 if result is ours else median(_ratios(result, ours)),
        cpu_seconds=median(_all(result, "cpu_seconds")),
        wire_bytes=moved,
        limit=limit_seconds(sum(own or ()), moved, rate),
        is_wire_only=own is None,
        split=_split(median(seconds), compute, update, wire_seconds(moved, rate)),
        loss=result.loss,
        spans=spans,
        versions=result.versions,
    )


def _ratios(result: Result, ours: Result) -> list[float]:
    """Each turn against the two of Parallax around it; after the last there is none."""
    before = _all(ours, "seconds")
    after = [*before[1:], before[-1]]
    pairs = zip(_all(result, "seconds"), before, after, strict=True)
    return [seconds / mean(around) for seconds, *around in pairs]


def _split(seconds: float, compute: float, update: float, wire: float) -> dict[str, float]:
    """Where a step's time goes, told the same way for engines that show nothing of themselves.

    Computing takes what it takes without an exchange, the update what the engine says or else the
    same; the exchange takes what its bytes need on the link; all the rest is waiting: for messages,
    for others, for a processor. What overlaps is taken off the exchange, so the parts add up.
    """
    update = min(update, seconds)
    compute = min(compute, seconds - update)
    exchange = min(wire, seconds - update - compute)
    wait = seconds - update - compute - exchange
    return {"compute": compute, "update": update, "exchange": exchange, "wait": wait}


def _spans(result: Result) -> dict[str, float]:
    names = result.turns[0].spans
    return {name: median(turn.spans.get(name, 0.0) for turn in result.turns) for name in names}


def _all(result: Result, name: str) -> list[float]:
    return [getattr(turn, name) for turn in result.turns]
