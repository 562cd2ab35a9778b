"""Contests → Markdown: a table for each setting, and the goals beside what was reached."""

from __future__ import annotations

from benchmarks.contest import Contest
from benchmarks.engines import ALONE, ENGINES, OURS
from benchmarks.figures import Figure, absent_of, figures_of
from benchmarks.goals import goals_table
from benchmarks.limits import formula_bytes
from benchmarks.workloads import by_name


def report(contests: list[Contest]) -> str:
    """The whole page, without plots."""
    parts = ["## Goals", goals_table(contests)]
    for contest in contests:
        parts += [f"## {contest.setting.title}", table(contest)]
    return "\n\n".join([*parts, "## Versions", versions(contests)]) + "\n"


def table(contest: Contest) -> str:
    setting = contest.setting
    workload = by_name(setting.workload)
    lines = [
        f"| engine | step, median [min–max] | Parallax = 1 | limit | step ÷ limit "
        f"| MB a host | CPU a worker | {workload.samples[1]}/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in figures_of(contest):
        lines.append(_line(each, setting.num_samples))
    text = "\n".join(lines)
    expected = formula_bytes(workload, setting.num_hosts) / 1e6
    text += f"\n\n{_note(contest)} Parallax's formula gives {expected:,.2f} MB."
    for name, why in absent_of(contest).items():
        text += f"\n- {ENGINES[name].title} is left out: {why}"
    return f"{text}\n\n{profile(figures_of(contest))}"


def profile(figures: list[Figure]) -> str:
    """Where the step of each engine goes, as its first worker measured it."""
    lines = []
    for each in figures:
        parts = [f"{name} {1e3 * of:,.1f}" for name, of in each.spans.items()]
        if parts:
            lines.append(f"- {each.title}: {', '.join(parts)}")
    return "\n".join(["ms of a step, by the first worker's clock:", *lines])


def _line(each: Figure, samples: int) -> str:
    milliseconds = f"{1e3 * each.seconds:,.1f} ms"
    spread = f"[{1e3 * each.fastest:,.1f}–{1e3 * each.slowest:,.1f}]"
    limit = "–" if each.engine == ALONE else f"{1e3 * each.limit:,.1f} ms"
    times = "–" if each.engine == ALONE else f"{each.seconds / each.limit:.2f}"
    cpu = f"{1e3 * each.cpu_seconds:,.1f} ms" if ENGINES[each.engine].is_synchronous else "–"
    return (
        f"| {each.title} | {milliseconds} {spread} | {each.ratio:.2f} × | {limit} | {times} "
        f"| {each.wire_bytes / 1e6:,.2f} | {cpu} | {samples / each.seconds:,.0f} |"
    )


def _note(contest: Contest) -> str:
    first = next(each for each in contest.sittings[0] if each.engine == OURS)
    return (
        f"{contest.started} UTC, {contest.machine}; {len(first.turns)} turns of each "
        f"engine, {first.num_steps} steps in a turn of Parallax."
    )


def versions(contests: list[Contest]) -> str:
    found = {each.title: each.versions for contest in contests for each in figures_of(contest)}
    return "\n".join(
        f"- {engine}: {', '.join(f'{name} {version}' for name, version in sorted(of.items()))}"
        for engine, of in found.items()
    )
