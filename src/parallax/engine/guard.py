"""Ids of embeddings that each worker has whole: a bad one is told to all workers, not only here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallax.comm.peers import Peers


class IdGuard:
    """Checks the ids of one embedding module before its lookup.

    Lookups of sharded tables tell all workers by themselves. A copy is looked up without them, so
    torch's own error would end one worker and leave the others to find out that it is gone.
    """

    def __init__(self, name: str, module: nn.Embedding | nn.EmbeddingBag, peers: Peers) -> None:
        self._name = name
        self._num_rows = module.num_embeddings
        self._peers = peers
        self._handle = module.register_forward_pre_hook(self._check)

    def remove(self) -> None:
        self._handle.remove()

    def _check(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        ids = inputs[0] if inputs else None
        if not isinstance(ids, Tensor) or ids.is_floating_point() or not ids.numel():
            return
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self._num_rows:
            bad = high if high >= self._num_rows else low
            error = IndexError(
                f"id {bad} on worker {self._peers.rank} is out of range for table {self._name!r}, "
                f"which has {self._num_rows} rows"
            )
            self._peers.report(error)
            raise error


def guard_copies(model: nn.Module, sharded: set[int], peers: Peers) -> list[IdGuard]:
    """Guard every embedding module whose weight is not in `sharded` (ids of parameters)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        IdGuard(names[id(module.weight)], module, peers)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) not in sharded
    ]
