"""Rows of several tables on their way at once.

[Note: families] Here rows lie by table, and those of a table by worker; on the wire they lie by
worker. Tables whose rows have one dtype and shape are a family: what comes for them is handled as
one tensor, so that the work does not grow with the number of tables or workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.exchange.peers import Lane, Peers


@dataclass(frozen=True)
class Family:
    """Tables alike, and what has come for them."""

    members: list[int]
    rows: Tensor
    """By worker, and in each by table."""


def families(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Which of the tensors have rows of one dtype and shape; by dtype first."""
    found: dict[torch.dtype, dict[torch.Size, list[int]]] = {}
    for i, tensor in enumerate(tensors):
        alike = found.setdefault(tensor.dtype, {})
        alike.setdefault(tensor.shape[1:], []).append(i)
    return [members for shapes in found.values() for members in shapes.values()]


class Shipment:
    """Several tensors on their way, each with its rows sorted by receiver.

    `sent[i, worker]` rows of tensor i go to a worker, `received[i, worker]` come from it. Tensors
    of one dtype share an exchange, whatever the lengths of their rows.
    """

    def __init__(
        self,
        peers: Peers,
        tensors: Sequence[Tensor],
        sent: Tensor,
        received: Tensor,
        lane: Lane = Lane.ROWS,
        groups: Sequence[list[int]] | None = None,
    ) -> None:
        """`groups`: which tensors are alike, if not those whose rows are."""
        self._peers = peers
        self._tensors = tensors
        self._sent, self._received = sent, received
        groups = families(tensors) if groups is None else groups
        self._loads = [
            self._load(list(alike), lane)
            for _, alike in itertools.groupby(groups, lambda group: tensors[group[0]].dtype)
        ]

    def arrived(self) -> list[Family]:
        """Wait for what comes."""
        found = []
        for groups, flat, work in self._loads:
            self._peers.wait(work)
            found += self._unpacked(groups, flat)
        return found

    def _load(
        self, groups: list[list[int]], lane: Lane
    ) -> tuple[list[list[int]], Tensor, dist.Work | None]:
        members = [i for group in groups for i in group]
        parts = [self._tensors[i].split_with_sizes(self._sent[i].tolist()) for i in members]
        pieces = list(itertools.chain.from_iterable(zip(*parts, strict=True)))
        packed = self._tensors[members[0]]
        widths = torch.ones(len(members), dtype=torch.int64)
        if len(groups) > 1:
            widths = torch.tensor([self._tensors[i].shape[1:].numel() for i in members])
            packed = torch.cat([piece.reshape(-1) for piece in pieces])
        elif len(members) > 1:
            packed = torch.cat(pieces)
        sent, received = (
            (widths[:, None] * counts[members]).sum(0).tolist()
            for counts in (self._sent, self._received)
        )
        return groups, *self._peers.start_exchange(packed, sent, received, lane)

    def _unpacked(self, groups: list[list[int]], flat: Tensor) -> list[Family]:
        if len(groups) == 1:
            return [Family(groups[0], flat)]
        shapes = [self._tensors[group[0]].shape[1:] for group in groups]
        counts = [self._received[group].sum(0) for group in groups]
        sizes = [shape.numel() * count for shape, count in zip(shapes, counts, strict=True)]
        pieces = flat.split_with_sizes(torch.stack(sizes, 1).flatten().tolist())
        return [
            Family(group, torch.cat(pieces[i :: len(groups)]).reshape(int(counts[i].sum()), *shape))
            for i, (group, shape) in enumerate(zip(groups, shapes, strict=True))
        ]
