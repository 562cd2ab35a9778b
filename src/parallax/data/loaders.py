"""The sharded loaders of a session, and their places in a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from parallax.data.epochs import Epochs
from parallax.data.feed import Feed
from parallax.data.loader import ShardedLoader

Place = dict[str, Any]


class Loaders:
    """Those that the script still has, in the order in which it made them.

    A script may call `shard()` for each epoch anew: a loader that it has dropped has no place, and
    the same DataLoader keeps its feed.
    """

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._made: list[weakref.ref[ShardedLoader]] = []
        self._feeds: weakref.WeakKeyDictionary[DataLoader[Any], Feed] = weakref.WeakKeyDictionary()
        self._waiting: list[tuple[Place, bool]] = []
        """Restored places of loaders that the script has yet to make."""

    @property
    def present(self) -> list[ShardedLoader]:
        found = [loader for made in self._made if (loader := made()) is not None]
        self._made = [made for made in self._made if made() is not None]
        return found

    def are_in_use(self, thread: int) -> bool:
        """Whether a thread of the script has a batch of any, or is in the end of an epoch."""
        feeds = [loader.feed for loader in self.present]
        return self._epochs.is_left or any(f.is_out and f.thread == thread for f in feeds)

    @property
    def epoch(self) -> int:
        """The epoch in which a script that is restored goes on."""
        over = self._epochs.is_left and not any(
            loader.feed.is_out and loader.feed.trains for loader in self.present
        )
        return self._epochs.number + over

    def feed_of(self, loader: DataLoader[Any], make: Callable[[], Feed]) -> Feed:
        if not isinstance(loader, DataLoader):
            return make()  # refused by the one who uses it
        if loader not in self._feeds:
            self._feeds[loader] = make()
        return self._feeds[loader]

    def add(self, loader: ShardedLoader) -> None:
        self._made.append(weakref.ref(loader))
        if self._waiting:
            _restore(loader, *self._waiting.pop(0))

    def restore(self, places: Sequence[Place], left: Sequence[int]) -> None:
        """Give their places back: now to those that are there, to others when they are made."""
        self._waiting = [(place, index in left) for index, place in enumerate(places)]
        for loader in self.present:
            if self._waiting:
                _restore(loader, *self._waiting.pop(0))


def _restore(loader: ShardedLoader, place: Place, is_left: bool) -> None:
    loader.load_state_dict(place)
    loader.feed.restore(is_left=is_left)
