"""Contests → Markdown: a table for each setting, and the goals beside what was reached."""

from __future__ import annotations

import itertools
import math
from statistics import median

from benchmarks.contest import WARM_UP_STEPS, Contest, Setting
from benchmarks.engines import ALONE, ENGINES, OURS
from benchmarks.figures import Figure, absent_of, figures_of
from benchmarks.goals import goals_table
from benchmarks.limits import formula_bytes
from benchmarks.origin import theft_note
from benchmarks.workloads import by_name

FEWEST_BYTES = 0.9
"""Of what the formula gives; an emulated accelerator has no loss that would tell."""
LOSS_TOLERANCE = 1e-3
"""Relative; synchronous engines differ by rounding only."""


def report(contests: list[Contest]) -> str:
    """The whole page, without plots."""
    parts = ["## Goals", goals_table(contests)]
    for contest in contests:
        parts += [f"## {contest.setting.title}", table(contest)]
    return "\n\n".join([*parts, "## Versions", versions(contests)]) + "\n"


def table(contest: Contest) -> str:
    setting = contest.setting
    workload = by_name(setting.workload)
    columns = ["engine", "step, median [min–max]", "Parallax = 1", "limit", "step ÷ limit"]
    columns += ["MB a host", "CPU a worker", f"{workload.samples[1]}/s"]
    if not setting.is_emulated:  # There all gradients are constants, and losses nothing.
        columns.append(f"loss after {WARM_UP_STEPS} steps")
    figures = figures_of(contest)
    lines = [columns, ["---"] * len(columns)]
    lines += [_line(each, setting)[: len(columns)] for each in figures]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines).replace(" --- ", "---")
    expected = formula_bytes(workload, setting.num_hosts)
    text += f"\n\n{_note(contest)} Parallax's formula gives {expected / 1e6:,.2f} MB."
    ours = next(each for each in figures if each.engine == OURS)
    if setting.rate is not None and ours.wire_bytes < FEWEST_BYTES * expected:
        text += "\n- **Parallax moved fewer bytes than it must: it does not train the same.**"
    for name, why in absent_of(contest).items():
        text += f"\n- {ENGINES[name].title} is left out: {why}"
    if not setting.is_emulated:
        text += "".join(f"\n- {line}" for line in _astray(figures))
    return f"{text}\n\n{profile(figures)}"


def _astray(figures: list[Figure]) -> list[str]:
    """Engines that should have Parallax's loss and have another."""
    ours = next(each for each in figures if each.engine == OURS)
    return [
        f"**{each.title} has another loss than Parallax: it does not train the same.**"
        for each in figures
        if each.engine != ALONE
        and ENGINES[each.engine].is_synchronous
        and not ENGINES[each.engine].rounds
        and not math.isclose(_loss(each), _loss(ours), rel_tol=LOSS_TOLERANCE)
    ]


def _loss(each: Figure) -> float:
    return math.nan if each.loss is None else each.loss


def profile(figures: list[Figure]) -> str:
    """Where the step of each engine goes, as its first worker measured it."""
    lines = []
    for each in figures:
        parts = [f"{name} {1e3 * of:,.1f}" for name, of in each.spans.items()]
        if parts:
            lines.append(f"- {each.title}: {', '.join(parts)}")
    return "\n".join(["ms of a step, by the first worker's clock:", *lines])


def _line(each: Figure, setting: Setting) -> list[str]:
    milliseconds = f"{1e3 * each.seconds:,.1f} ms"
    spread = f"[{1e3 * each.fastest:,.1f}–{1e3 * each.slowest:,.1f}]"
    limit = times = "–"
    if each.engine != ALONE and each.limit > 0:
        limit = f"{1e3 * each.limit:,.1f} ms{' (wire only)' * each.is_wire_only}"
        times = f"{each.seconds / each.limit:.2f}"
    # Of the worker's own process, which says little where others do its work.
    cpu = f"{1e3 * each.cpu_seconds:,.1f} ms" if ENGINES[each.engine].num_processes == 1 else "–"
    return [
        each.title,
        f"{milliseconds} {spread}",
        f"{each.ratio:.2f} ×",
        limit,
        times,
        f"{each.wire_bytes / 1e6:,.2f}",
        cpu,
        f"{setting.num_samples / each.seconds:,.0f}",
        f"{_loss(each):.5g}",
    ]


def _note(contest: Contest) -> str:
    first = next(each for each in contest.sittings[0] if each.engine == OURS)
    return (
        f"{contest.started} UTC, {contest.machine}; {len(first.turns)} turns of each "
        f"engine, {first.num_steps} steps in a turn of Parallax at "
        f"{first.versions.get('parallax', 'an unknown commit')}."
        f"{theft_note(contest.stolen)}{_sittings(contest)}"
    )


def _sittings(contest: Contest) -> str:
    """Who was up with whom, if not all were."""
    sittings = [[each for each in one if each.absent is None] for one in contest.sittings]
    sittings = [sitting for sitting in sittings if sitting]
    if len(sittings) < 2:
        return ""
    groups = [
        ", ".join(ENGINES[each.engine].title for each in sitting if each.engine != OURS)
        for sitting in sittings
    ]
    steps = [
        f"{1e3 * median(turn.seconds for turn in each.turns):,.1f}"
        for sitting in sittings
        for each in sitting
        if each.engine == OURS
    ]
    return (
        f" {len(sittings)} sittings, for memory: {'; '.join(groups)}. Parallax was in each, at "
        f"{', '.join(steps)} ms; its row is the first."
    )


def versions(contests: list[Contest]) -> str:
    """Of each engine; of what has changed from contest to contest, all."""
    found: dict[str, dict[str, list[str]]] = {}
    for each in itertools.chain(*map(figures_of, contests)):
        for name, version in sorted(each.versions.items()):
            known = found.setdefault(each.title, {}).setdefault(name, [])
            if version not in known:
                known.append(version)
    return "\n".join(
        f"- {engine}: " + ", ".join(f"{name} {' and '.join(each)}" for name, each in of.items())
        for engine, of in found.items()
    )
