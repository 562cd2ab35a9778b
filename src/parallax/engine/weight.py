"""How much each worker's mean loss counts."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.comm.peers import Peers
from parallax.errors import ConfigError


class Weight:
    """How much this worker's mean loss counts: n_i·N/Σn. See [Note: scale] in dense.py."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._from_data: float | None = None
        self._by_hand: float | None = None
        self._total: Tensor | None = None
        self._work: dist.Work | None = None

    def set_counts(self, counts: list[int]) -> None:
        """Every worker's number of samples in the batch that comes now."""
        self._by_hand = self._total = None
        self._from_data = self._scale(counts[self._peers.rank], sum(counts))
        self._peers.ledger.add_samples(counts[self._peers.rank])

    def forget_counts(self) -> None:
        """The loader has ended."""
        self._from_data = None

    def set_by_hand(self, count: float | Tensor) -> None:
        """This worker's count for the backwards until the next step or batch. Collective."""
        try:
            self._by_hand = float(count)
        except (TypeError, ValueError, RuntimeError):
            self._by_hand = math.nan
        if not 0 <= self._by_hand < math.inf:
            raise ConfigError(f"weight() takes this worker's count, a number ≥ 0, not {count!r}")
        self._total = torch.tensor([self._by_hand], dtype=torch.float64)
        self._work = self._peers.start_total(self._total, dist.ReduceOp.SUM)

    def end_step(self) -> None:
        self._by_hand = self._total = None

    def scale(self) -> float:
        """The factor for the gradients of this worker's next backward."""
        if self._by_hand is not None and self._total is not None:
            if self._work is not None:
                with self._peers.waiting(f"the workers' weights in step {self._peers.step}"):
                    self._peers.wait(self._work)
                self._work = None
            return self._scale(self._by_hand, float(self._total))
        return 1.0 if self._from_data is None else self._from_data

    def _scale(self, count: float, total: float) -> float:
        return count * self._peers.num_workers / total if total else 0.0
