"""Contests → pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from benchmarks.contest import Contest
from benchmarks.convergence import Outcome
from benchmarks.engines import ALONE, ENGINES, OURS
from benchmarks.figures import PARTS, Figure, figures_of
from benchmarks.workloads import by_name

COLOURS = {name: f"C{place}" for place, name in enumerate(ENGINES)}
COLOURS |= {"parallax-bf16": "#6baed6", "parallax-int8": "#9ecae1"}
COLOURS |= {"parallax-sharded": "#08519c", "parallax-hot": "#3182bd"}
OTHER_COLOUR = "#08306b"  # of other checkouts
PART_COLOURS = ("#4c78a8", "#72b7b2", "#f58518", "#d0d0d0")


def draw(contests: list[Contest], folder: Path) -> list[Path]:
    """Every picture that these contests have the figures for."""
    scaled = [c for c in contests if not c.setting.workload.startswith("sparsity")]
    swept = [c for c in contests if c.setting.workload.startswith("sparsity")]
    pictures = {}
    if scaled:
        pictures["throughput"] = _against_workers(scaled, _throughput, "{unit} a second")
        pictures["bytes"] = _against_workers(scaled, _megabytes, "MB a host and step")
        pictures["split"] = _splits(scaled)
    if swept:
        pictures["sparsity"] = _sweep(swept)
    return [_save(picture, folder / f"{name}.png") for name, picture in pictures.items()]


def draw_convergence(outcome: Outcome, folder: Path) -> Path:
    picture, (by_steps, by_seconds) = _grid(2)
    for name, track in outcome.tracks.items():
        by_steps.plot(track.steps, track.perplexities, marker=".", label=name)
        by_seconds.plot(track.seconds, track.perplexities, marker=".", label=name)
    for axes, label in ((by_steps, "steps"), (by_seconds, "seconds of training")):
        axes.axhline(outcome.race.target, color="black", ls="--", lw=0.8)
        axes.set(xlabel=label, ylabel="perplexity, held out", yscale="log")
        axes.legend()
        axes.grid(alpha=0.3)
    return _save(picture, folder / "convergence.png")


def _against_workers(contests: list[Contest], value: Any, label: str) -> Picture:
    kinds = _kinds(contests)
    picture, rows = _grid(len(kinds))
    for axes, ((name, rate, is_emulated), members) in zip(rows, kinds.items(), strict=False):
        lines: dict[str, list[tuple[int, float]]] = {}
        for contest in members:
            for each in figures_of(contest):
                if each.engine != ALONE:
                    place = contest.setting.num_hosts
                    lines.setdefault(each.engine, []).append((place, value(each, contest)))
        for engine, points in sorted(lines.items(), key=lambda item: item[0] != OURS):
            width = 2.5 if engine == OURS else 1.2
            axes.plot(
                *zip(*sorted(points), strict=True),
                marker="o",
                lw=width,
                color=COLOURS.get(engine, OTHER_COLOUR),
                label=ENGINES[engine].title,
            )
        if value is _throughput:
            _limit_line(axes, members)
        compute = "emulated" if is_emulated else "real compute"
        axes.set(title=f"{name}, {rate}, {compute}", xlabel="workers (one a host)")
        axes.set(ylabel=label.format(unit=by_name(name).samples[1]))
        _scale(axes, [height for points in lines.values() for _, height in points])
        axes.set_xticks(sorted({contest.setting.num_hosts for contest in members}))
        axes.legend(fontsize=7, framealpha=0.5)
        axes.grid(alpha=0.3)
    return picture


def _scale(axes: Axes, heights: list[float]) -> None:
    """From zero, so that heights can be compared; by powers where they differ too much for it."""
    if max(heights) > 10 * min(heights):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _limit_line(axes: Axes, members: list[Contest]) -> None:
    points = []
    for contest in members:
        ours = next(each for each in figures_of(contest) if each.engine == OURS)
        if ours.limit > 0:
            points.append((contest.setting.num_hosts, contest.setting.num_samples / ours.limit))
    if points:
        where = zip(*sorted(points), strict=True)
        axes.plot(*where, ls="--", marker="_", color="black", label="Parallax's limit")


def _splits(contests: list[Contest]) -> Picture:
    """Of each kind, the setting with the most hosts."""
    largest = [
        max(members, key=lambda contest: contest.setting.num_hosts)
        for members in _kinds(contests).values()
    ]
    picture, rows = _grid(len(largest))
    for axes, contest in zip(rows, largest, strict=False):
        figures = [each for each in figures_of(contest) if each.engine != ALONE][::-1]
        left = [0.0] * len(figures)
        for part, colour in zip(PARTS, PART_COLOURS, strict=True):
            widths = [1e3 * each.split[part] for each in figures]
            axes.barh([each.title for each in figures], widths, left=left, color=colour, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_title(contest.setting.title, fontsize=10)
        axes.set_xlabel("ms a step")
        # One very slow engine must not press the others flat.
        others = sorted(1e3 * each.seconds for each in figures)
        if len(others) > 1 and others[-1] > 5 * others[-2]:
            axes.set_xlim(0, 1.3 * others[-2])
            place = max(range(len(figures)), key=lambda index: figures[index].seconds)
            cut = f"{others[-1]:,.0f} ms → "
            axes.text(1.3 * others[-2], place, cut, ha="right", va="center", fontsize=8)
        axes.legend(fontsize=7, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return picture


def _sweep(contests: list[Contest]) -> Picture:
    picture, rows = _grid(2)
    for axes, value, label in zip(
        rows, (_milliseconds, _megabytes), ("ms a step", "MB a host and step"), strict=False
    ):
        lines: dict[str, list[tuple[float, float]]] = {}
        for contest in contests:
            percent = float(contest.setting.workload.split("-")[1])
            for each in figures_of(contest):
                if each.engine != ALONE:
                    lines.setdefault(each.engine, []).append((percent, value(each, contest)))
        for engine, points in lines.items():
            where = zip(*sorted(points), strict=True)
            axes.plot(
                *where,
                marker="o",
                color=COLOURS.get(engine, OTHER_COLOUR),
                label=ENGINES[engine].title,
            )
        setting = contests[0].setting
        axes.set(
            title=f"one table, {setting.num_hosts} hosts × {setting.rate}",
            xscale="log",
            yscale="log",
        )
        axes.set(xlabel="% of the rows touched by a worker", ylabel=label)
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    return picture


def _kinds(contests: list[Contest]) -> dict[tuple[str, str, bool], list[Contest]]:
    kinds: dict[tuple[str, str, bool], list[Contest]] = {}
    for contest in contests:
        setting = contest.setting
        kind = (setting.workload, setting.rate or "loopback", setting.is_emulated)
        kinds.setdefault(kind, []).append(contest)
    return kinds


def _throughput(each: Figure, contest: Contest) -> float:
    return contest.setting.num_samples / each.seconds


def _megabytes(each: Figure, contest: Contest) -> float:
    return each.wire_bytes / 1e6


def _milliseconds(each: Figure, contest: Contest) -> float:
    return 1e3 * each.seconds


def _grid(count: int) -> tuple[Picture, list[Axes]]:
    columns = min(count, 3)
    height = -(-count // columns)
    picture, axes = plt.subplots(
        height, columns, figsize=(5 * columns, 3.6 * height), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for unused in flat[count:]:
        unused.axis("off")
    return picture, flat


def _save(picture: Picture, path: Path) -> Path:
    picture.savefig(path, dpi=110)
    plt.close(picture)
    return path
