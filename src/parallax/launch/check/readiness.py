"""Whether hosts are ready to train together: what stands in the way, and what is odd."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallax.launch.check.links import Link

_MOST_NAMED = 5
_MAX_SKEW_SECONDS = 1.0
_SLOW = 0.5
_FEW_PORTS = 1000


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a check found on one host; None is what it could not find."""

    name: str
    error: str | None = None
    """Why nothing is known of the host: a sentence that says what to do, without a full stop."""
    python: str | None = None
    torch: str | None = None
    parallax: str | None = None
    hostname: str | None = None
    address: str | None = None
    interface: str | None = None
    num_cores: int | None = None
    gpus: tuple[str, ...] = ()
    """The name of each."""
    num_free_ports: int | None = None
    """Of those that the kernel gives to who asks for any."""
    clock_offset_seconds: float | None = None
    """How far its clock is ahead of the one where the check was started."""
    clock_uncertainty_seconds: float = 0.0


Links = Mapping[tuple[str, str], Link | str]
"""For pairs of names, in either order: the link as the first sees it, or why there is none."""

Pairs = dict[tuple[str, str], Link | str]
"""The same for every pair of hosts that are up, in the order of the hosts."""


@dataclass(frozen=True)
class Readiness:
    """A sentence for each finding, with what to do."""

    problems: tuple[str, ...]
    """What must change before a job can run."""
    warnings: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        return not self.problems


def judge(hosts: Sequence[HostFacts], links: Links) -> Readiness:
    """What the facts mean for a job on these hosts."""
    up = [host for host in hosts if host.error is None]
    return Readiness(
        problems=(
            *(f"{host.name}: {host.error}." for host in hosts if host.error is not None),
            *_missing("Parallax", "parallax-torch", {host.name: host.parallax for host in up}),
            *_missing("PyTorch", "torch", {host.name: host.torch for host in up}),
            *_different("Parallax", {host.name: host.parallax for host in up}),
            *_different("torch", {host.name: release_of(host.torch) for host in up}),
            *_unconnected(pairs_of(hosts, links)),
        ),
        warnings=(
            *_different_builds(up),
            *_different("Python", {host.name: _minor(host.python) for host in up}),
            *_without_gpus(up),
            *_short_of_ports(up),
            *_skewed(up),
            *_slow(pairs_of(hosts, links)),
        ),
    )


def pairs_of(hosts: Sequence[HostFacts], links: Links) -> Pairs:
    """The link of each pair of hosts that are up, seen from the one that is named first."""
    names = [host.name for host in hosts if host.error is None]
    return {pair: _link(links, *pair) for pair in itertools.combinations(names, 2)}


def slower_rate(link: Link) -> float:
    """In bytes a second, of the two directions: an exchange ends with the slower one."""
    return min(link.send_bytes_per_second, link.receive_bytes_per_second)


def _link(links: Links, one: str, other: str) -> Link | str:
    if (one, other) in links:
        return links[one, other]
    found = links.get((other, one), "it was not measured; start the check again")
    return found.reversed() if isinstance(found, Link) else found


def _missing(title: str, package: str, versions: Mapping[str, str | None]) -> Iterator[str]:
    names = [name for name, version in versions.items() if version is None]
    if names:
        yield (
            f"{_listed(names)}: no {title} there; install {package}, or give the python that has "
            "it as `python` in the hosts file."
        )


def _different(title: str, versions: Mapping[str, str | None]) -> Iterator[str]:
    by_version = _by_value(versions)
    if len(by_version) > 1:
        yield f"{title} is {_spread(by_version)}; install the same version on all hosts."


def _different_builds(hosts: Sequence[HostFacts]) -> Iterator[str]:
    """Where the release is the same: another release is a problem of its own."""
    by_build = _by_value({host.name: host.torch for host in hosts})
    if len(by_build) > 1 and len({release_of(build) for build in by_build}) == 1:
        yield (
            f"torch is {_spread(by_build)}; install the same build on hosts of the same kind, "
            "or their results can differ."
        )


def release_of(version: str | None) -> str | None:
    """2.13.0 of 2.13.0+cpu."""
    return None if version is None else version.split("+")[0]


def _minor(version: str | None) -> str | None:
    """3.11 of 3.11.7."""
    return None if version is None else ".".join(version.split(".")[:2])


def _without_gpus(hosts: Sequence[HostFacts]) -> Iterator[str]:
    names = [host.name for host in hosts if not host.gpus]
    if 0 < len(names) < len(hosts):
        yield (
            f"{_listed(names)}: no GPU there, though other hosts have some; see what `nvidia-smi` "
            "says, or leave the host out."
        )


def _short_of_ports(hosts: Sequence[HostFacts]) -> Iterator[str]:
    for host in hosts:
        if host.num_free_ports is not None and host.num_free_ports < _FEW_PORTS:
            yield (
                f"{host.name}: only {host.num_free_ports} ports are free for workers; end what "
                "holds the others, or widen net.ipv4.ip_local_port_range there."
            )


def _skewed(hosts: Sequence[HostFacts]) -> Iterator[str]:
    for host in hosts:
        offset = host.clock_offset_seconds or 0.0
        if abs(offset) - host.clock_uncertainty_seconds > _MAX_SKEW_SECONDS:
            direction = "ahead" if offset > 0 else "behind"
            yield (
                f"{host.name}: its clock is {abs(offset):.1f} s {direction}; set it by NTP, or "
                "the times in logs do not compare."
            )


def _unconnected(pairs: Pairs) -> Iterator[str]:
    broken = {pair: why for pair, why in pairs.items() if isinstance(why, str)}
    if len(broken) == len(pairs) > 1:
        yield f"No two hosts have a connection: {next(iter(broken.values()))}."
        return
    hosts, others = _split(broken, pairs)
    for name in hosts:
        why = next(why for pair, why in broken.items() if name in pair)
        yield f"{name} has a connection to no other host: {why}."
    for one, other in others:
        yield f"{one} and {other} have no connection: {broken[one, other]}."


def _slow(pairs: Pairs) -> Iterator[str]:
    rates = {pair: slower_rate(link) for pair, link in pairs.items() if isinstance(link, Link)}
    usual = statistics.median(rates.values()) if rates else 0.0
    slow = {pair: rate / usual for pair, rate in rates.items() if rate < _SLOW * usual}
    hosts, others = _split(slow, pairs)
    advice = "see what else uses the network there, and what its cards and cables can do"
    for name in hosts:
        share = _percent(max(rate for pair, rate in slow.items() if name in pair))
        yield f"{name} has at most {share} of the usual rate to every other host; {advice}."
    for one, other in sorted(others, key=lambda pair: slow[pair]):
        share = _percent(slow[one, other])
        yield f"{one} and {other} have {share} of the usual rate between them; {advice}."


def _split(
    some: Collection[tuple[str, str]], pairs: Pairs
) -> tuple[list[str], list[tuple[str, str]]]:
    """The hosts of which every pair is among `some`, and those of `some` without such a host."""
    names = dict.fromkeys(itertools.chain.from_iterable(some))
    hosts = [
        name
        for name in names
        if len(pairs) > 1 and all(pair in some for pair in pairs if name in pair)
    ]
    return hosts, [pair for pair in some if not set(pair) & set(hosts)]


def _by_value(values: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Value → the names that have it, the most frequent first."""
    found: dict[str, list[str]] = {}
    for name, value in values.items():
        if value is not None:
            found.setdefault(value, []).append(name)
    return dict(sorted(found.items(), key=lambda entry: -len(entry[1])))


def _spread(by_value: Mapping[str, Sequence[str]]) -> str:
    return ", but ".join(f"{value} on {_listed(names)}" for value, names in by_value.items())


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
