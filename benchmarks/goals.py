"""What is to be reached, and what was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.contest import Contest
from benchmarks.engines import ENGINES, OURS
from benchmarks.figures import Figure, figures_of
from benchmarks.limits import formula_bytes
from benchmarks.workloads import by_name


@dataclass(frozen=True)
class Goal:
    """A ratio in one setting: to a peer's step, to the limit or to the formula's bytes; or to our
    own step in another setting."""

    setting: str
    against: str
    value: float
    engine: str = OURS

    @property
    def is_most(self) -> bool:
        """Whether less is better."""
        return self.against not in ENGINES


GOALS = (
    Goal("lm-8x200mbit-emulated", "ddp-sparse", 4.5),
    Goal("lm-8x200mbit-emulated", "ddp-sparse", 6.0, "parallax-bf16"),
    Goal("lm-8x200mbit-emulated", "horovod", 6.0),
    Goal("lm-8x200mbit-emulated", "torchrec", 2.5),
    Goal("lm-2x200mbit-emulated", "ddp-dense", 40.0),
    Goal("lm-4x200mbit-emulated", "tensorflow", 2.8),
    Goal("dlrm-4x1gbit-emulated", "torchrec", 1.5),
    *(
        Goal(f"resnet-{where}", "ddp-dense", 0.98)
        for where in (
            "2x1gbit-real",
            "4x1gbit-real",
            "2x200mbit-emulated",
            "4x200mbit-emulated",
            "8x200mbit-emulated",
        )
    ),
    Goal("small-2xloopback-real", "ddp-sparse", 1.0),
    Goal("lm-8x200mbit-emulated", "limit", 1.25),
    Goal("lm-8x200mbit-emulated", "formula", 1.05),
    Goal("lm-8x200mbit-emulated", "lm-2x200mbit-emulated", 1.3),
)


_SETTINGS = {goal.setting for goal in GOALS}


def goals_table(contests: list[Contest]) -> str:
    by_setting = {contest.setting.name: contest for contest in contests}
    lines = ["| setting | against | goal | reached | |", "|---|---|---|---|---|"]
    for goal in GOALS:
        contest = by_setting.get(goal.setting)
        value = reached(goal, contest, by_setting) if contest else None
        sign = "≤" if goal.is_most else "≥"
        against = goal.against if goal.against in _SETTINGS else f"its {goal.against}"
        if goal.against in ENGINES:
            against = ENGINES[goal.against].title
        shown = "not measured" if value is None else f"{value:.2f} ×"
        mark = "" if contest is None or value is None else _mark(goal, value, contest)
        setting = goal.setting
        if goal.engine != OURS:
            setting += f", {ENGINES[goal.engine].title}"
        lines.append(f"| {setting} | {against} | {sign} {goal.value:g} × | {shown} | {mark} |")
    return "\n".join(lines)


def _mark(goal: Goal, value: float, contest: Contest) -> str:
    """Where a goal was not reached, also what Parallax's step consists of."""
    if value <= goal.value if goal.is_most else value >= goal.value:
        return "reached"
    ours = next(each for each in figures_of(contest) if each.engine == goal.engine)
    parts = ", ".join(f"{name} {1e3 * of:,.0f}" for name, of in ours.split.items())
    return f"**not reached**; ms: {parts}"


def reached(goal: Goal, contest: Contest, others: Mapping[str, Contest]) -> float | None:
    """What was, by this contest and perhaps another one, if it was held."""
    figures = _by_engine(contest)
    ours = figures[OURS]
    if goal.against in _SETTINGS:
        other = others.get(goal.against)
        return None if other is None else ours.seconds / _by_engine(other)[OURS].seconds
    if goal.against == "limit":
        return None if ours.is_wire_only else ours.seconds / ours.limit
    if goal.against == "formula":
        workload = by_name(contest.setting.workload)
        return ours.wire_bytes / formula_bytes(workload, contest.setting.num_hosts)
    if goal.against not in figures or goal.engine not in figures:
        return None
    return figures[goal.against].ratio / figures[goal.engine].ratio


def _by_engine(contest: Contest) -> dict[str, Figure]:
    return {each.engine: each for each in figures_of(contest)}
