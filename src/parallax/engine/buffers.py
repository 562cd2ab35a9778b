"""Buffers of the model: rank 0's go to all workers after a step that changed any."""

from __future__ import annotations

from torch import Tensor, nn

from parallax.comm.peers import Peers


class Buffers:
    """Detects changes of this worker's buffers, and broadcasts rank 0's."""

    def __init__(self, model: nn.Module, *, broadcasts: bool) -> None:
        """Without `broadcasts` every worker keeps its own buffers."""
        self._model = model
        self._broadcasts = broadcasts
        self._have_changed = False
        """Some worker's buffers have changed since the last broadcast; the same on all workers."""
        self._modules = list(model.modules())
        self._children: list[nn.Module | None] = []
        self._versions: list[tuple[int, int]] = []

    def now(self) -> list[Tensor]:
        """Return the buffers of this moment: a module may have replaced one by another tensor.

        Walking through hundreds of modules is slow, so that is done only if a module has other
        children than before.
        """
        children = [child for module in self._modules for child in module._modules.values()]
        if children != self._children:
            self._modules, self._children = list(self._model.modules()), children
        found: dict[int, Tensor] = {}
        for module in self._modules:
            for buffer in module._buffers.values():
                if buffer is not None:
                    found[id(buffer)] = buffer
        return list(found.values())

    def are_touched(self) -> bool:
        """Return whether a buffer has changed on this worker since the last call."""
        versions = [(id(buffer), buffer._version) for buffer in self.now()]
        touched, self._versions = versions != self._versions, versions
        return touched

    def mark_changed(self) -> None:
        """Note that buffers of some worker have changed. Called on all workers."""
        self._have_changed = True

    def broadcast_changes(self, peers: Peers) -> None:
        """Give rank 0's buffers to all, if any worker's have changed. Collective then."""
        if self._have_changed and self._broadcasts:
            peers.spread_all(self.now(), f"giving out buffers in step {peers.step}")
            self.are_touched()
            self._have_changed = False
