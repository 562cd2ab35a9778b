"""`parallax plan`: what a run's folder tells, and what another cluster would make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallax.errors import ConfigError
from parallax.observability.journal import last_run, read
from parallax.observability.ledger import AMOUNTS, Entry, Record
from parallax.planning.cost import Cluster, Link
from parallax.planning.forecast import Architecture, Forecast, Work, scaling, work_of
from parallax.planning.plan import Plan
from parallax.text import in_columns, rate, size

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_BAR = 40


@dataclass(frozen=True)
class Run:
    """What a run's folder tells of its last run."""

    plan: Plan
    changes: tuple[str, ...]
    mean: Record | None
    """Of the steps since the plan or the links last changed, but those of the first line, which
    warm up; None before any was written."""
    cluster: Cluster | None

    @staticmethod
    def of(folder: str) -> Run:
        events = last_run(read(folder))
        plans = [event for event in events if event["kind"] == "plan"]
        changes = [event for event in events if event["kind"] in ("plan", "note")]
        if not plans:
            raise ConfigError(f"{folder!r} has no plan yet: its run ended before it began")
        return Run(
            Plan.from_json(json.dumps(plans[-1]["plan"])),
            tuple(f"step {event['step']}: {event['why']}" for event in changes),
            _mean(_settled(events)),
            _cluster(events),
        )

    @property
    def work(self) -> Work:
        if self.mean is None:
            raise ConfigError("the run has written no steps yet, so there is nothing to go by")
        plan = self.plan
        return work_of(plan.parameters, self.mean, plan.num_workers, plan.bucket_bytes)


def described(run: Run) -> list[str]:
    """The plan with what was predicted beside what was seen, and how it came about."""
    if run.mean is None:
        return [str(run.plan), "No steps are written yet.", *run.changes]
    lines = [str(run.plan.observed(run.mean, run.cluster))]
    lines[-1] += f"; worker 0 waited {1e3 * run.mean.waiting_seconds:.1f} ms of it for others"
    if run.cluster is not None and run.cluster.num_hosts > 1:
        lines.append(_link("Links between hosts", run.cluster.between))
    if run.cluster is not None and run.cluster.workers_per_host > 1:
        lines.append(_link("Links within a host", run.cluster.within))
    return [*lines, "", "How it came about", *(f"  {change}" for change in run.changes)]


def what_if(run: Run, cluster: Cluster) -> list[str]:
    """Throughput on a cluster that is not there, by architecture and number of hosts."""
    hosts = host_counts(cluster.num_hosts)
    found = scaling(run.work, cluster, hosts)
    title = (
        f"{cluster.num_hosts} hosts × {cluster.workers_per_host} workers "
        f"({_link('between', cluster.between)}; {_link('within', cluster.within)}), "
        f"predicted {_unit(run)} a second"
    )
    rows = [("hosts", *(str(number) for number in hosts))]
    for architecture, steps in found.items():
        rows.append((architecture.value, *(f"{step.throughput:,.0f}" for step in steps)))
    return [title, *in_columns(rows), "", *_bars(found)]


def draw(run: Run, cluster: Cluster, path: str) -> None:
    """The same as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    hosts = host_counts(cluster.num_hosts)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    # Two of them often lie upon each other.
    styles = dict(zip(Architecture, ("-", "-", "--"), strict=True))
    for architecture, steps in scaling(run.work, cluster, hosts).items():
        throughput = [step.throughput for step in steps]
        axes.plot(hosts, throughput, styles[architecture], marker="o", label=architecture.value)
    axes.set_xticks(hosts, [str(number) for number in hosts])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"hosts with {cluster.workers_per_host} workers each")
    axes.set_ylabel(f"{_unit(run)} a second")
    axes.set_title(_link("predicted, links", cluster.between))
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # A suffix that it does not know.
        raise ConfigError(f"--plot {path!r}: {error}") from error


def _unit(run: Run) -> str:
    return "samples" if run.mean is not None and run.mean.samples else "workers' steps"


def host_counts(largest: int) -> list[int]:
    """1, 2, 4 … and the largest."""
    found = [1]
    while 2 * found[-1] < largest:
        found.append(2 * found[-1])
    return found if largest == 1 else [*found, largest]


def cluster_of(
    run: Run,
    num_hosts: int | None,
    workers_per_host: int | None,
    rate: str | None,
    local_rate: str | None,
) -> Cluster:
    """The run's cluster, with what the user wants otherwise."""
    if run.cluster is None and rate is None:
        raise ConfigError("the run did not measure its links: give --rate, say --rate 100gbit")
    known = run.cluster or Cluster(1, run.plan.num_workers, _UNKNOWN, _UNKNOWN)
    between, within = known.between, known.within
    if rate is not None:
        between = replace(between, bytes_per_second=rate_of(rate), burst_bytes=0.0)
    if local_rate is not None:
        within = replace(within, bytes_per_second=rate_of(local_rate))
    return replace(
        known.with_hosts(num_hosts or known.num_hosts),
        workers_per_host=workers_per_host or known.workers_per_host,
        between=between,
        within=within,
    )


_UNKNOWN = Link(bytes_per_second=10e9, latency_seconds=1e-4)
"""Of a run on one worker: the memory of a host, and no measurement."""


def rate_of(text: str) -> float:
    """Bytes a second, from what `tc` would take: 200mbit, 1gbit, 100gbit."""
    found = re.fullmatch(r"([0-9.]+)([kmg]?)bit", text.lower())
    if found is None or not float(found[1]) > 0:
        raise ConfigError(f"{text!r} is not a rate: say 200mbit, 1gbit or 100gbit")
    return float(found[1]) * _UNITS[found[2]] / 8


# Inside -----------------------------------------------------------------------------------


def _settled(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of steps since the last change; those before it if there are none yet."""
    found: list[dict[str, Any]] = []
    has_changed = False
    for event in events:
        has_changed |= event["kind"] in ("plan", "cluster")
        if event["kind"] == "steps":
            if has_changed:
                found, has_changed = [], False
            found.append(event)
    return found


def _mean(events: Sequence[dict[str, Any]]) -> Record | None:
    later = events[1:] or events
    total, found = sum(event["number"] for event in later), Record(step=0)
    for event in later:
        share, mean = event["number"] / total, event["mean"]
        found.step = mean["step"]
        for name in AMOUNTS:
            setattr(found, name, getattr(found, name) + share * mean.get(name, 0.0))
        for name, entry in mean["parameters"].items():
            scaled = Entry(**{key: value * share for key, value in entry.items()})
            found.parameters.setdefault(name, Entry()).add(scaled)
    return found if later else None


def _cluster(events: Sequence[dict[str, Any]]) -> Cluster | None:
    for event in reversed(events):
        if event["kind"] == "cluster":
            return Cluster(
                event["num_hosts"],
                event["workers_per_host"],
                Link(**event["between"]),
                Link(**event["within"]),
                event.get("ring_seconds"),
            )
    return None


def _bars(found: dict[Architecture, list[Forecast]]) -> list[str]:
    """The last column, drawn, and what a step of it moves."""
    last = {architecture.value: steps[-1] for architecture, steps in found.items()}
    largest = max(step.throughput for step in last.values())
    rows = [("", "", "over a host's link", "messages of a worker")]
    for name, step in last.items():
        bar = "█" * max(1, round(_BAR * step.throughput / largest))
        rows.append((name, bar, size(step.traffic.link_bytes), f"{step.traffic.messages:,}"))
    return in_columns(rows)


def _link(name: str, link: Link) -> str:
    found = f"{name}: {rate(link.bytes_per_second)}, {1e6 * link.latency_seconds:.0f} µs"
    return f"{found}, {size(link.burst_bytes)} at once after a rest" if link.burst_bytes else found
