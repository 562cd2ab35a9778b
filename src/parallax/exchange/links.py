"""How fast the workers' own links are: a few messages before the training starts."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from parallax.cost import Cluster, Link
from parallax.exchange.peers import Peers
from parallax.hosts import Hosts

_SECONDS = 0.1
"""A message that takes as long tells the rate; shorter ones are mostly latency."""
_MAX_SECONDS = 1.0
"""For the messages of a link altogether; with both kinds of links it is two."""
_FIRST_BYTES, _MAX_BYTES = 64 << 10, 256 << 20
_NUM_SMALL = 11
_WHERE = "measuring the links"


def measure(
    peers: Peers, hosts: Hosts, device: torch.device, known_rate: float | None
) -> Cluster | None:
    """The workers' cluster; None for one worker. Collective.

    If worker 0 knows the rate between hosts, only the latency is measured there.
    """
    between = within = None
    if len(hosts) > 1:
        ring = [ranks[0] for ranks in hosts.workers]
        others = ring[(hosts.index + 1) % len(ring)], ring[hosts.index - 1]
        told = torch.tensor([known_rate or 0.0], dtype=torch.float64)
        rate = float(peers.broadcast(told, _WHERE)) or None
        between = _measure(peers, device, others if hosts.local_rank == 0 else None, rate)
    most = max(len(ranks) for ranks in hosts.workers)
    if most > 1:
        local, place = hosts.workers[hosts.index], hosts.local_rank
        others = local[(place + 1) % len(local)], local[place - 1]
        within = _measure(peers, device, others if len(local) > 1 else None)
    some = between or within
    if some is None:
        return None
    return Cluster(len(hosts), most, between or some, within or some)


def _measure(
    peers: Peers,
    device: torch.device,
    others: tuple[int, int] | None,
    known_rate: float | None = None,
) -> Link:
    """`others`: whom this worker sends to, and whom it hears; None if it only waits."""
    small = [_timed(peers, device, 8, others) for _ in range(_NUM_SMALL)]
    # The slowest worker's, so that all go on alike.
    latency, size_bytes, start = _slowest(peers, median(small)), _FIRST_BYTES, time.monotonic()
    if known_rate is not None:
        return Link(known_rate, latency)
    while True:
        seconds = _slowest(peers, _timed(peers, device, size_bytes, others))
        spent = _slowest(peers, time.monotonic() - start)
        # The next one takes four times as long.
        if seconds >= _SECONDS or 4 * seconds + spent > _MAX_SECONDS or size_bytes >= _MAX_BYTES:
            return Link(size_bytes / max(seconds - latency, 1e-9), latency)
        size_bytes *= 4


def _timed(
    peers: Peers, device: torch.device, size_bytes: int, others: tuple[int, int] | None
) -> float:
    sent, received = [0] * peers.num_workers, [0] * peers.num_workers
    if others is not None:
        sent[others[0]], received[others[1]] = size_bytes, size_bytes
    values = torch.empty(sum(sent), dtype=torch.uint8, device=device)
    start = time.perf_counter()
    with peers.waiting(_WHERE):
        peers.exchange(values, sent, received)
        if device.type == "cuda":  # Waiting there only orders what comes after it.
            torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _slowest(peers: Peers, seconds: float) -> float:
    told = torch.tensor([seconds], dtype=torch.float64)
    return float(peers.total(told, dist.ReduceOp.MAX, _WHERE))
