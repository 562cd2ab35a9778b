"""Measure the links between the workers with a few messages before training starts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from parallax.cluster.topology import Hosts
from parallax.comm.peers import Peers
from parallax.planning.cost import Cluster, Link

_SECONDS = 0.15
"""A message that takes this long shows the rate; shorter ones are mostly latency."""
_MAX_SECONDS = 0.7
"""Limit for all messages of a link."""
_SUMS_SECONDS = 0.25
"""Limit for all-reduces. With both kinds of links and bursts (0.3 s), all takes two seconds."""
_FIRST_BYTES, _MAX_BYTES = 64 << 10, 256 << 20
_NUM_SMALL, _NUM_SUMS = 11, 5
_MIN_MESSAGES, _MAX_MESSAGES = 5, 20
_BURST_SECONDS, _REST_SECONDS, _NUM_BURSTS = 0.04, 0.06, 3
"""Duration of a message that measures the burst size, and of the pause before it."""
_MIN_BURST = 0.2
"""Share of that message's bytes; smaller bursts are measurement noise."""
_WHERE = "measuring the links"


def measure(
    peers: Peers, hosts: Hosts, device: torch.device, known_rate: float | None
) -> Cluster | None:
    """Return the measured cluster; None for one worker. Collective.

    If worker 0 knows the rate between hosts, only the latency between hosts is measured.
    """
    between = within = None
    if len(hosts) > 1:
        told = torch.tensor([known_rate or 0.0], dtype=torch.float64)
        rate = float(peers.broadcast(told, _WHERE)) or None
        others = _pair(peers, [ranks[0] for ranks in hosts.workers])
        between = _measure(peers, device, others, rate)
        if rate is None:  # Else the rate may be an old one, or that of another pair.
            between = replace(between, burst_bytes=_burst(peers, device, others, between))
    most = max(len(ranks) for ranks in hosts.workers)
    if most > 1:
        within = _measure(peers, device, _pair(peers, hosts.workers[hosts.index]))
    some = between or within
    if some is None:
        return None
    return Cluster(len(hosts), most, between or some, within or some, _ring_turn(peers, device))


Others = tuple[int | None, int | None]
"""The worker that this one sends to, and the one that it receives from."""


def _pair(peers: Peers, ranks: Sequence[int]) -> Others:
    """Let every second worker send to the next one: rates are measured in one direction."""
    if peers.rank not in ranks:
        return None, None
    place = ranks.index(peers.rank)
    near = ranks[place ^ 1] if place ^ 1 < len(ranks) else None
    return (None, near) if place % 2 else (near, None)


def _measure(
    peers: Peers, device: torch.device, others: Others, known_rate: float | None = None
) -> Link:
    start = time.monotonic()
    small = [_timed(peers, device, 8, others) for _ in range(_NUM_SMALL)]
    # The slowest worker's time, so that all workers continue in the same way.
    latency, size_bytes = _slowest(peers, median(small)), _FIRST_BYTES
    if known_rate is not None:
        return Link(known_rate, latency)
    fastest = math.inf
    for number in range(_MAX_MESSAGES):
        seconds = _slowest(peers, _timed(peers, device, size_bytes, others))
        spent = _slowest(peers, time.monotonic() - start)
        fastest = min(fastest, seconds)
        is_long = seconds >= _SECONDS or size_bytes >= _MAX_BYTES
        # The first messages of a connection are slow, so a long one is sent again.
        following = seconds if is_long else 4 * seconds
        if following + spent > _MAX_SECONDS or (is_long and number >= _MIN_MESSAGES):
            break
        if not is_long:
            size_bytes, fastest = 4 * size_bytes, math.inf
    return Link(size_bytes / max(fastest - latency, 1e-9), latency)


def _burst(peers: Peers, device: torch.device, others: Others, link: Link) -> float:
    """Return the bytes that pass at once after a pause, up to those of `_BURST_SECONDS`."""
    size_bytes = min(int(link.bytes_per_second * _BURST_SECONDS), _MAX_BYTES)
    found = []
    for _ in range(_NUM_BURSTS):
        time.sleep(_REST_SECONDS)
        found.append(_timed(peers, device, size_bytes, others))
    seconds = _slowest(peers, min(found)) - link.latency_seconds
    burst_bytes = size_bytes - link.bytes_per_second * max(seconds, 0.0)
    return burst_bytes if burst_bytes > _MIN_BURST * size_bytes else 0.0


def _ring_turn(peers: Peers, device: torch.device) -> float:
    """Return the seconds of one turn of a ring all-reduce of few numbers.

    The first all-reduce shows for how many more there is time. If there is none, the first counts,
    although it may be slower, because connections start slowly.
    """
    seconds = _slowest(peers, _sum_seconds(peers, device))
    # `_slowest` takes as long as an all-reduce: one is done, and one is to come.
    number = min(int(_SUMS_SECONDS / max(seconds, 1e-9)) - 3, _NUM_SUMS)
    if number > 0:
        found = [_sum_seconds(peers, device) for _ in range(number)]
        seconds = _slowest(peers, median(found))
    return seconds / (2 * (peers.num_workers - 1))


def _sum_seconds(peers: Peers, device: torch.device) -> float:
    values = torch.zeros(64 * peers.num_workers, device=device)
    start = time.perf_counter()
    with peers.waiting(_WHERE):
        peers.reduce(values)
        return _since(start, device)


def _timed(peers: Peers, device: torch.device, size_bytes: int, others: Others) -> float:
    sent, received = [0] * peers.num_workers, [0] * peers.num_workers
    if others[0] is not None:
        sent[others[0]] = size_bytes
    if others[1] is not None:
        received[others[1]] = size_bytes
    values = torch.empty(sum(sent), dtype=torch.uint8, device=device)
    start = time.perf_counter()
    with peers.waiting(_WHERE):
        peers.exchange(values, sent, received)
        return _since(start, device)


def _since(start: float, device: torch.device) -> float:
    if device.type == "cuda":  # On GPUs `wait` does not block.
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _slowest(peers: Peers, seconds: float) -> float:
    told = torch.tensor([seconds], dtype=torch.float64)
    return float(peers.total(told, dist.ReduceOp.MAX, _WHERE))
