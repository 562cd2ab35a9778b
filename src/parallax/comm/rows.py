"""Rows of all groups on their way between workers, in one exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from parallax.comm.peers import Lane, Peers
from parallax.tables.host import Counts


class RowExchange:
    """An exchange under way: one tensor for each group, with its rows ordered by receiver.

    `sent[group, worker]` rows go to a worker, `received[group, worker]` come from it. The rows of
    several groups travel as bytes, those for one worker side by side.
    """

    def __init__(
        self,
        peers: Peers,
        tensors: Sequence[Tensor],
        sent: Counts,
        received: Counts,
        lane: Lane = Lane.ROWS,
    ) -> None:
        self._peers = peers
        self._shapes = [(each.dtype, each.shape[1:]) for each in tensors]
        self._received = received
        if len(tensors) == 1:
            values, widths = tensors[0], np.ones(1, np.int64)
        else:
            widths = np.array([row_size(each) for each in tensors], np.int64)
            values = _packed(tensors, sent)
        self._came, self._work = peers.start_exchange(
            values, (widths @ sent).tolist(), (widths @ received).tolist(), lane
        )

    def wait(self) -> list[Tensor]:
        """Return, for each group, the rows that came, ordered by sender."""
        self._peers.wait(self._work)
        if len(self._shapes) == 1:
            return [self._came]
        widths = [dtype.itemsize * shape.numel() for dtype, shape in self._shapes]
        sizes = (np.array(widths, np.int64)[:, None] * self._received).T.ravel().tolist()
        pieces = self._came.split_with_sizes(sizes)
        number = len(self._shapes)
        return [
            torch.cat(pieces[i::number]).view(dtype).reshape(-1, *shape)
            if shape.numel()
            else self._came.new_empty((int(self._received[i].sum()), *shape), dtype=dtype)
            for i, (dtype, shape) in enumerate(self._shapes)
        ]


def row_size(rows: Tensor) -> int:
    """Return the bytes of a row."""
    return rows.element_size() * rows.shape[1:].numel()


def _packed(tensors: Sequence[Tensor], sent: Counts) -> Tensor:
    pieces = [
        rows.contiguous().view(-1).view(torch.uint8).split_with_sizes((row_size(rows) * n).tolist())
        for rows, n in zip(tensors, sent, strict=True)
    ]
    return torch.cat([piece for by_group in zip(*pieces, strict=True) for piece in by_group])


def by_group(values: Tensor, counts: Counts) -> list[Tensor]:
    """Split values that are ordered by worker and group, of which there are
    `counts[worker, group]`: one tensor for each group, ordered by worker."""
    num_groups = counts.shape[1]
    if num_groups == 1:
        return [values]
    pieces = values.split_with_sizes(counts.ravel().tolist())
    return [torch.cat(pieces[i::num_groups]) for i in range(num_groups)]
