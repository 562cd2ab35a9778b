"""The text of `parallax check`: the hosts, the links between them, and the verdict."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from parallax.launch.check.columns import WIDTH, in_columns, printable
from parallax.launch.check.links import Link
from parallax.launch.check.readiness import (
    HostFacts,
    Links,
    Pairs,
    Readiness,
    judge,
    pairs_of,
    slower_rate,
)

_MOST_HOSTS = 8
_NUM_SLOWEST = 5
_MOST_FINDINGS = 10
_LONG_NAME = 20

_HOST_TITLES = (
    "host hostname address interface ports cores GPUs python torch parallax clock".split()
)
_LINK_TITLES = "from to latency there back".split()


def report(hosts: Sequence[HostFacts], links: Links) -> str:
    """All that a user reads, with a newline at the end; no line is longer than 100 columns."""
    pairs = pairs_of(hosts, links)
    readiness = judge(hosts, links)
    short = _short_names([host.name for host in hosts])
    link_part = _link_table if len(hosts) <= _MOST_HOSTS else _link_summary
    parts = (
        _host_table(hosts, short),
        link_part({(short[one], short[other]): link for (one, other), link in pairs.items()}),
        _findings("problems", readiness.problems),
        _findings("warnings", readiness.warnings),
        _verdict(hosts, pairs, readiness),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """How the tables name the hosts: without their domains, where these would make them wide."""
    firsts = [name.split(".")[0] for name in names]
    is_clear = len(set(firsts)) == len(names) and not any(first.isdigit() for first in firsts)
    if is_clear and max(map(len, names), default=0) > _LONG_NAME:
        return dict(zip(names, firsts, strict=True))
    return dict(zip(names, names, strict=True))


def _host_table(hosts: Sequence[HostFacts], short: Mapping[str, str]) -> str:
    no_gpu = "none" if any(host.gpus for host in hosts) else ""
    rows = [[short[host.name], *_host_cells(host, no_gpu)] for host in hosts]
    cut = ("hostname", "GPUs", "address")
    return in_columns(_HOST_TITLES, rows, right=("ports", "cores", "clock"), cut=cut)


def _host_cells(host: HostFacts, no_gpu: str) -> list[str]:
    if host.error is not None:
        return [host.error]
    is_alias = host.hostname and host.hostname.split(".")[0] != host.name.split(".")[0]
    return [
        host.hostname or "" if is_alias else "",
        host.address or "",
        host.interface or "",
        "" if host.num_free_ports is None else str(host.num_free_ports),
        "" if host.num_cores is None else str(host.num_cores),
        _gpus(host.gpus) or no_gpu,
        host.python or "",
        host.torch or "none",
        host.parallax or "none",
        _clock(host),
    ]


def _gpus(gpus: Sequence[str]) -> str:
    counts = Counter(gpu.removeprefix("NVIDIA ") for gpu in gpus)
    return ", ".join(f"{count} × {name}" for name, count in counts.items())


def _clock(host: HostFacts) -> str:
    """How far ahead, or how well it is known to be the same."""
    offset, uncertainty = host.clock_offset_seconds, host.clock_uncertainty_seconds
    if offset is None:
        return ""
    if abs(offset) <= uncertainty:
        return f"±{_duration(uncertainty)}"
    return f"{'+' if offset > 0 else '−'}{_duration(abs(offset))}"


def _link_table(pairs: Pairs) -> str:
    rows = [[*pair, *_link_cells(link)] for pair, link in pairs.items()]
    return in_columns(_LINK_TITLES, rows, right=("latency", "there", "back")) if rows else ""


def _link_cells(link: Link | str) -> list[str]:
    if isinstance(link, str):
        return ["no connection"]
    rates = (link.send_bytes_per_second, link.receive_bytes_per_second)
    return [_duration(link.latency_seconds), *map(_rate, rates)]


def _link_summary(pairs: Pairs) -> str:
    """Of many: how many there are, what is usual, and the slowest."""
    found = {pair: link for pair, link in pairs.items() if isinstance(link, Link)}
    text = f"{len(found)} of {_plural(len(pairs), 'pair')} of hosts are connected"
    if not found:
        return text
    slowest = sorted(found.items(), key=lambda entry: slower_rate(entry[1]))[:_NUM_SLOWEST]
    latency = statistics.median(link.latency_seconds for link in found.values())
    rate = statistics.median(slower_rate(link) for link in found.values())
    return (
        f"{text}, with {_rate(rate)} and {_duration(latency)} in the median; the slowest:\n"
        + _link_table(dict(slowest))
    )


def _findings(title: str, sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    more = len(sentences) - _MOST_FINDINGS
    lines = [_wrapped(sentence) for sentence in sentences[:_MOST_FINDINGS]]
    return "\n".join([f"{title}:", *lines, *([f"  … and {more} more"] if more > 0 else [])])


def _wrapped(sentence: str) -> str:
    return textwrap.fill(
        printable(sentence),
        WIDTH,
        initial_indent="  - ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )


def _verdict(hosts: Sequence[HostFacts], pairs: Pairs, readiness: Readiness) -> str:
    counts = []
    if readiness.is_ready:
        counts.append(_plural(len(hosts), "host"))
        rates = [slower_rate(link) for link in pairs.values() if isinstance(link, Link)]
        counts += [f"slowest link {_rate(min(rates))}"] if rates else []
    else:
        counts.append(_plural(len(readiness.problems), "problem"))
    if readiness.warnings:
        counts.append(_plural(len(readiness.warnings), "warning"))
    return f"{'ready' if readiness.is_ready else 'not ready'}: {', '.join(counts)}"


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{_three_digits(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds)} s"


def _rate(bytes_per_second: float) -> str:
    megabits = bytes_per_second * 8 / 1e6
    if megabits < 1000:
        return f"{_three_digits(megabits)} Mbit/s"
    return f"{_three_digits(megabits / 1000)} Gbit/s"


def _three_digits(number: float) -> str:
    if number < 10:
        return f"{number:.2f}"
    return f"{number:.1f}" if number < 100 else f"{number:.0f}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
