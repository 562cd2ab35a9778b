"""Row gradients on their way to the owners, which sum them.

[Note: parts] Gradients go in several parts, so that one is summed while the next ones travel. A row
belongs to the part `index % num_parts`, which its senders and its owner know alike and which
spreads the rows that are touched most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallax.comm.compression import RowFormat, unpacked
from parallax.comm.peers import Peers
from parallax.comm.rows import RowExchange
from parallax.tables.host import Counts, repeat, to_device, to_host
from parallax.tables.merge import Merge, put_rows

Waiting = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Outgoing:
    """Rows of one group that this worker sends, ordered by receiver."""

    values: Tensor
    sent: Counts
    """By receiver."""
    indices: Tensor
    """Which row of the receiver each value belongs to."""

    def parts(self, num_parts: int) -> list[tuple[Tensor, Counts]]:
        """Return what goes in each part, and how much to whom. See [Note: parts]."""
        if num_parts == 1:
            return [(self.values, self.sent)]
        sent, order = _by_part(self.indices, self.sent, num_parts)
        pieces = self.values.index_select(0, order).split_with_sizes(sent.sum(1).tolist())
        return list(zip(pieces, sent, strict=True))


class Incoming:
    """Rows that come here: how many from whom, and which of them are the same row."""

    def __init__(self, indices: Sequence[Tensor], received: Counts, num_parts: int) -> None:
        """`indices` are by group, ordered by sender: which row here each value belongs to.
        `received` is by group and sender."""
        self.num_parts = num_parts
        self.received: list[Counts] = []
        """By group: how many come in each part from each sender."""
        self._indices: list[Tensor] = []
        """By group and part."""
        self._merges: list[Merge] = []
        for rows, counts in zip(indices, received, strict=True):
            if num_parts == 1:
                self.received.append(counts[None])
                self._indices.append(rows)
            else:
                by_part, order = _by_part(rows, counts, num_parts)
                self.received.append(by_part)
                self._indices += rows[order].split_with_sizes(by_part.sum(1).tolist())

    def merges(self) -> list[Merge]:
        """Return which rows are the same, by group and part. It needs no values, so it can be
        found while they travel, or before."""
        if not self._merges:
            self._merges = Merge.of(*self._indices)
        return self._merges


class RowSums:
    """Gradients under way, and the sums of those that come here."""

    def __init__(
        self,
        peers: Peers,
        outgoing: Sequence[Outgoing],
        incoming: Incoming,
        like: Sequence[Tensor],
        row_format: RowFormat = RowFormat.FLOAT32,
    ) -> None:
        """Send all parts. `like` are tensors of the kind that the sums are to have."""
        self.waited_seconds = 0.0
        self._row_format = row_format
        self._like = like
        self._incoming = incoming
        parts = [each.parts(incoming.num_parts) for each in outgoing]
        self._exchanges = [
            RowExchange(
                peers,
                [parts[group][number][0] for group in range(len(parts))],
                np.stack([parts[group][number][1] for group in range(len(parts))]),
                np.stack([received[number] for received in incoming.received]),
            )
            for number in range(incoming.num_parts)
        ]
        incoming.merges()

    def wait(self, scale: float, waiting: Waiting) -> list[tuple[Tensor, Tensor]]:
        """Return, for each group, the distinct rows in order, and their sums times `scale`."""
        merges, num_parts = self._incoming.merges(), self._incoming.num_parts
        sums: list[list[Tensor]] = [[] for _ in self._like]
        for number, exchange in enumerate(self._exchanges):
            start = time.perf_counter()
            with waiting():
                came = exchange.wait()
            self.waited_seconds += time.perf_counter() - start
            for group, rows in enumerate(came):
                values = unpacked(rows, self._like[group], self._row_format)
                sums[group].append(merges[group * num_parts + number].sum(values, scale))
        return [
            _joined(merges[group * num_parts : (group + 1) * num_parts], of_group)
            for group, of_group in enumerate(sums)
        ]


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
