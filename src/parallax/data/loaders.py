"""The sharded loaders of a session, and their positions in a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from parallax.data.epochs import Epochs
from parallax.data.loader import ShardedLoader
from parallax.data.usage import BatchSavePoints, LoaderUsage, StepCounter

Place = dict[str, Any]


class Loaders:
    """The sharded loaders that the script still has, in the order in which it made them.

    A script may call `shard()` again in each epoch: a loader that it has dropped has no position,
    and the same DataLoader keeps its usage.
    """

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._made: list[weakref.ref[ShardedLoader]] = []
        self._usages: weakref.WeakKeyDictionary[DataLoader[Any], LoaderUsage]
        self._usages = weakref.WeakKeyDictionary()
        self._waiting: list[tuple[Place, bool]] = []
        """Restored positions of loaders that the script has not made yet."""

    @property
    def present(self) -> list[ShardedLoader]:
        found = [loader for made in self._made if (loader := made()) is not None]
        self._made = [made for made in self._made if made() is not None]
        return found

    def are_in_use(self, thread: int) -> bool:
        """Return whether this thread has a batch of any loader, or is at the end of an epoch."""
        usages = [loader.usage for loader in self.present]
        return self._epochs.is_left or any(u.is_out and u.thread == thread for u in usages)

    @property
    def epoch(self) -> int:
        """The epoch in which a restored script continues."""
        over = self._epochs.is_left and not any(
            loader.usage.is_out and loader.usage.trains for loader in self.present
        )
        return self._epochs.number + over

    def usage_of(
        self, loader: DataLoader[Any], counter: StepCounter, save_points: BatchSavePoints | None
    ) -> LoaderUsage:
        """Return the usage of a DataLoader, which may have been sharded before."""
        found = LoaderUsage(self._epochs, counter, save_points)
        if not isinstance(loader, DataLoader):  # ShardedLoader refuses it.
            return found
        return self._usages.setdefault(loader, found)

    def add(self, loader: ShardedLoader) -> None:
        """Add a loader, and restore its position if a checkpoint has one for it."""
        self._made.append(weakref.ref(loader))
        if self._waiting:
            _restore(loader, *self._waiting.pop(0))

    def restore(self, places: Sequence[Place], left: Sequence[int]) -> None:
        """Restore the positions: now those of present loaders, others when loaders are made."""
        self._waiting = [(place, index in left) for index, place in enumerate(places)]
        for loader in self.present:
            if self._waiting:
                _restore(loader, *self._waiting.pop(0))


def _restore(loader: ShardedLoader, place: Place, is_left: bool) -> None:
    loader.load_state_dict(place)
    loader.usage.restore(is_left=is_left)
