"""Row gradients on their way to the owners, which sum them.

[Note: parts] Gradients go in several parts, so that one is summed while the next ones travel. A row
belongs to the part `index % number`, which its senders and its owner know alike and which spreads
the rows that are touched most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallax.comm.peers import Lane, Peers
from parallax.comm.rows import RowExchange
from parallax.tables.host import Counts, repeat, to_device, to_host
from parallax.tables.merge import Merge, put_rows
from parallax.wire import Wire, unpacked

Waiting = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Traffic:
    """Rows of one group: who sends how many to whom, and which rows they are there."""

    values: Tensor
    """What this worker sends, by receiver."""
    sent: Counts
    """By receiver."""
    going: Tensor
    """Which row of the receiver each value belongs to."""
    received: Counts
    """By sender."""
    coming: Tensor
    """Which row here each value belongs to that comes."""


class RowSums:
    """Gradients under way, and the sums of those that come here."""

    def __init__(
        self,
        peers: Peers,
        traffic: Sequence[Traffic],
        like: Sequence[Tensor],
        wire: Wire = Wire.FLOAT32,
        num_parts: int = 1,
        lane: Lane = Lane.ROWS,
    ) -> None:
        """Send all parts. `like` are tensors of the kind that the sums are to have."""
        self.waited_seconds = 0.0
        self._wire = wire
        self._like = like
        parts = [_cut(each, num_parts) for each in traffic]
        self._exchanges = [
            RowExchange(
                peers,
                [part.values for part in together],
                np.stack([part.sent for part in together]),
                np.stack([part.received for part in together]),
                lane,
            )
            for together in zip(*parts, strict=True)
        ]
        # Which rows are the same is found while they travel.
        coming = [part.coming for of_group in parts for part in of_group]
        merges = Merge.of(*coming)
        self._merges = [merges[i : i + num_parts] for i in range(0, len(merges), num_parts)]

    def wait(self, scale: float, waiting: Waiting) -> list[tuple[Tensor, Tensor]]:
        """Return, for each group, the distinct rows in order, and their sums times `scale`."""
        sums: list[list[Tensor]] = [[] for _ in self._like]
        for number, exchange in enumerate(self._exchanges):
            start = time.perf_counter()
            with waiting():
                came = exchange.wait()
            self.waited_seconds += time.perf_counter() - start
            for i, rows in enumerate(came):
                values = unpacked(rows, self._like[i], self._wire)
                sums[i].append(self._merges[i][number].sum(values, scale))
        return [_joined(*each) for each in zip(self._merges, sums, strict=True)]


def _cut(traffic: Traffic, number: int) -> list[Traffic]:
    """Divide what one group sends. See [Note: parts]."""
    if number == 1:
        return [traffic]
    sent, order = _by_part(traffic.going, traffic.sent, number)
    received, order_here = _by_part(traffic.coming, traffic.received, number)
    pieces = traffic.values.index_select(0, order).split_with_sizes(sent.sum(1).tolist())
    going = traffic.going[order].split_with_sizes(sent.sum(1).tolist())
    coming = traffic.coming[order_here].split_with_sizes(received.sum(1).tolist())
    return [Traffic(pieces[i], sent[i], going[i], received[i], coming[i]) for i in range(number)]


def _by_part(rows: Tensor, sizes: Counts, number: int) -> tuple[Counts, Tensor]:
    """Count rows, which are ordered by worker, by part and worker; return their order by these."""
    parts = rows % number
    workers = repeat(to_device(np.arange(len(sizes)), rows.device), sizes)
    counts = torch.bincount(parts * len(sizes) + workers, minlength=number * len(sizes))
    return to_host(counts).reshape(number, len(sizes)), torch.argsort(parts, stable=True)


def _joined(merges: Sequence[Merge], sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return all parts' rows in the order that they have without parts, so that nothing that is
    computed from them depends on a number that a clock chose."""
    if len(merges) == 1:
        return merges[0].rows, sums[0]
    rows, order = torch.sort(torch.cat([merge.rows for merge in merges]))
    places = torch.empty_like(order)
    places.scatter_(0, order, torch.arange(len(order), device=order.device))
    values = sums[0].new_empty((len(rows), *sums[0].shape[1:]))
    for part, where in zip(
        sums, places.split_with_sizes([len(merge.rows) for merge in merges]), strict=True
    ):
        put_rows(values, where, part)
    return rows, values
