"""Buffers of the model, which all workers take from rank 0 after a step that changed them."""

from __future__ import annotations

from torch import Tensor, nn

from parallax.comm.peers import Peers


class Buffers:
    """Sees whether this worker's buffers have changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._children: list[nn.Module | None] = []
        self._versions: list[tuple[int, int]] = []

    def now(self) -> list[Tensor]:
        """Return the buffers: a module may have put another tensor in a buffer's place. To go
        through hundreds of modules takes long, so that is done only if one has other children than
        before."""
        children = [child for module in self._modules for child in module._modules.values()]
        if children != self._children:
            self._modules, self._children = list(self._model.modules()), children
        found = (buffer for module in self._modules for buffer in module._buffers.values())
        return list({id(buffer): buffer for buffer in found if buffer is not None}.values())

    def are_touched(self) -> bool:
        """Whether a buffer has changed since this was asked last."""
        versions = [(id(buffer), buffer._version) for buffer in self.now()]
        touched, self._versions = versions != self._versions, versions
        return touched

    def broadcast(self, peers: Peers, where: str) -> None:
        """Give rank 0's buffers to all. Collective."""
        peers.spread_all(self.now(), where)
        self.are_touched()
