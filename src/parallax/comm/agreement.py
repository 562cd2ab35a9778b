"""What sharded loaders need of the other workers."""

from __future__ import annotations

import torch
from torch import Tensor

from parallax.comm.peers import Peers


class Agreement:
    """Small integers that all workers must have alike."""

    def __init__(self, peers: Peers) -> None:
        self.rank = peers.rank
        self.num_workers = peers.num_workers
        self._peers = peers

    def broadcast_ints(self, values: Tensor | None) -> Tensor:
        """Rank 0 gives them, the others pass None."""
        where = "agreeing on the order of samples"
        size = torch.tensor([0 if values is None else len(values)])
        size = self._peers.broadcast(size, where)
        if values is None:
            values = torch.empty(int(size), dtype=torch.int64)
        return self._peers.broadcast(values, where)

    def gather_ints(self, value: int) -> list[int]:
        """One of each worker, in rank order."""
        found = self._peers.gather(torch.tensor([value]), "agreeing on batch sizes")
        return [int(each) for each in found]
