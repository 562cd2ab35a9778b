"""What `session.shard(loader)` returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterDataPipe

from parallax.data.draws import random_state
from parallax.data.feed import Feed
from parallax.data.indexed import IndexSource
from parallax.data.order import Agreement, order_of, stock_batches
from parallax.data.source import Epoch, Ready, Source
from parallax.data.stream import StreamSource, is_stream
from parallax.errors import CheckpointError, ConfigError, MismatchError

_numbers = itertools.count()
"""Of the sharded loaders of a process and of the passes over them, in their order."""


Pass = tuple[int, int]
"""A loader's number, and that of the pass over it."""


class Follower(Protocol):
    """Who prefetches rows for the batches of a loader."""

    def is_followed(self) -> bool:
        """Whether a loader is read here by the thread that trains."""

    def reads_ahead(self, loader: int) -> bool:
        """Whether the batch after the next one is of use; the same on all workers."""

    def draws(self, loader: int) -> None:
        """Reading this loader draws random numbers here."""

    def declare(self, loader: int, ids: dict[str, Callable[[Any], Any]]) -> None:
        """The script names the ids of some tables."""

    def prefetch(self, of: Pass, batch: Any, following: tuple[Any, ...]) -> None:
        """The script gets a batch; `following` is the one after it, if it has been read."""

    def end_data(self) -> None:
        """The loader has ended."""


class ShardedLoader:
    """This worker's share of every global batch of a DataLoader; each `for` is an epoch.

    All workers iterate together and make the same number of steps. No sample of an epoch is lost
    or seen twice, whatever its size: a worker that has none left in the last step gets a batch
    with no rows. With one worker this is the loader itself, with a place that can be restored.

    By default the loader's batch size is the worker's, and may differ between workers; with
    `split` it is the size of the global batch. What an epoch's order is, worker 0 decides: with
    `shuffle=True` it is the order of one process that was seeded like worker 0.

    Iterable datasets (and loaders with no length, with `batch_size=None` or with an iteration of
    their own) are read wholly by every worker, which keeps every N-th batch or, with `split`, a
    part of each. They must give the same batches on every worker: pass no dataset that shards
    itself by rank, and let one that draws random numbers all along draw them from its own seeded
    generator. Randomness of torch at the start of an epoch and in loader workers is made the same.

    `on_batch` gets all workers' numbers of samples, in rank order, just before each batch;
    `on_end` is called after the last. `feed` is told what the script asks for.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        agreement: Agreement,
        *,
        split: bool,
        on_batch: Callable[[list[int]], None],
        on_end: Callable[[], None] = lambda: None,
        feed: Feed | None = None,
        follower: Follower | None = None,
        ids: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        _check_loader(loader, agreement.num_workers)
        _check_alike(loader, agreement, split)
        self.epoch = 0
        self.feed = feed or Feed()
        self._on_batch = on_batch
        self._on_end = on_end
        self._follower = follower
        self._number = next(_numbers)
        self._draws = False
        """Reading draws random numbers in this process."""
        self._source = _source_of(loader, agreement, split)
        self._num_samples = _num_samples(loader)
        if ids and follower is not None:
            follower.declare(self._number, dict(ids))
        self._place: _Place | None = None
        self._saved: dict[str, int | Tensor] | None = None

    def __len__(self) -> int:
        """The steps of a whole epoch."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        if self.feed.is_done():
            return iter(())
        saved, self._saved = self._saved, None
        if self._place is not None:
            self.epoch += 1  # the epoch before was left unfinished
        consumed, drawn = _restored(saved)
        epoch, ready = self._source.begin(drawn, consumed)
        self._place = _Place(epoch, consumed)
        return self._batches(self._place, ready, is_resumed=saved is not None)

    def _batches(self, place: _Place, ready: Iterator[Ready], is_resumed: bool) -> Iterator[Any]:
        num_steps = 0
        self.feed.begin()
        place.epoch.draw()
        this_pass = (self._number, next(_numbers))
        try:
            following: tuple[Ready, ...] = ()
            while (found := self._fetched(ready, following)) is not None:
                num_steps += 1
                following = self._followed(ready, place.epoch.is_over(found.consumed))
                self.feed.hand_out()
                place.consumed = found.consumed
                self._on_batch(found.counts)
                self._foresee(this_pass, found, following)
                yield found.batch
        finally:
            if self._place is place:
                self.feed.leave()
        self._on_end()
        if self._follower is not None:
            self._follower.end_data()
        if self._place is place:
            self._place = None
            self.epoch += 1
        if is_resumed and num_steps == 0:
            yield from self  # it was saved at the epoch's very end

    def _fetched(self, ready: Iterator[Ready], following: tuple[Ready, ...]) -> Ready | None:
        self.feed.ask(self.epoch)
        return following[0] if following else self._read(ready)

    def _followed(self, ready: Iterator[Ready], is_last: bool) -> tuple[Ready, ...]:
        """The batch after the one that is handed out, if it is of use already."""
        if is_last or self._follower is None or not self._follower.reads_ahead(self._number):
            return ()
        found = self._read(ready)
        return () if found is None else (found,)

    def _read(self, ready: Iterator[Ready]) -> Ready | None:
        """The next batch. If reading draws random numbers it is not to be done any earlier."""
        if self._follower is None or self._draws or not self._follower.is_followed():
            return next(ready, None)
        before = random_state()
        found = next(ready, None)
        if before != random_state():
            self._draws = True
            self._follower.draws(self._number)
        return found

    def _foresee(self, this_pass: Pass, found: Ready, following: tuple[Ready, ...]) -> None:
        if self._follower is not None:
            ahead = tuple(each.batch for each in following)
            self._follower.prefetch(this_pass, found.batch, ahead)

    def state_dict(self) -> dict[str, int | Tensor]:
        """The place after the batch yielded last: integers, the same on every worker.

        It fits any number of workers. "order" is what the epoch's order is made of: a seed, the
        state of a generator, or the indices where only they can tell. Of a pass that
        the script has left and will not go on with, it is the beginning of the next.
        """
        if self._saved is not None:
            return dict(self._saved)
        place = self._place
        if self.feed.is_over:
            return {"epoch": self.epoch + (place is not None), "consumed": 0}
        if place is None or place.epoch.drawn is None:
            return {"epoch": self.epoch, "consumed": 0}
        if place.epoch.is_over(place.consumed):
            return {"epoch": self.epoch + 1, "consumed": 0}
        return {
            "epoch": self.epoch,
            "consumed": place.consumed,
            "kind": self._source.kind,
            "samples": self._num_samples,
            "order": place.epoch.drawn,
        }

    def load_state_dict(self, state: Mapping[str, int | Tensor]) -> None:
        """Lets the next `for` go on where `state` was taken; called on every worker."""
        self.check_fits(state)
        self.epoch = int(state["epoch"])
        self._place = None
        self._saved = dict(state) if "order" in state else None

    def check_fits(self, state: Mapping[str, int | Tensor]) -> None:
        """Raises what `load_state_dict` would, and changes nothing."""
        if not {"epoch", "consumed"} <= state.keys():
            raise CheckpointError(
                f"the place of a loader has the keys epoch and consumed, not {sorted(state)}"
            )
        if "order" not in state:
            return
        if state.get("kind") != self._source.kind:
            raise CheckpointError(
                "the checkpoint was made with another kind of loader: its sampler, batch sampler, "
                "generator or dataset type is not this one's. Restore with the loader it had"
            )
        if state.get("samples") != self._num_samples:
            raise CheckpointError(
                f"the checkpoint was made in the midst of {state.get('samples')} samples, and the "
                f"loader has {self._num_samples}. Restore with the dataset it had, or start the "
                "epoch anew by not restoring the loader's place"
            )


class _Place:
    """Where an iteration is; one that was left behind by a newer iteration keeps its own."""

    def __init__(self, epoch: Epoch, consumed: int) -> None:
        self.epoch, self.consumed = epoch, consumed


def _restored(saved: Mapping[str, int | Tensor] | None) -> tuple[int, Tensor | None]:
    if saved is None:
        return 0, None
    # A checkpoint may have been loaded onto a device.
    return int(saved["consumed"]), torch.as_tensor(saved["order"]).cpu()


def _source_of(loader: DataLoader[Any], agreement: Agreement, split: bool) -> Source:
    if is_stream(loader):
        return StreamSource(loader, agreement, split)
    return IndexSource(loader, agreement, split)


def _kind_of(loader: DataLoader[Any]) -> int:
    return StreamSource.kind if is_stream(loader) else order_of(loader).kind


def _check_loader(loader: Any, num_workers: int) -> None:
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"shard() takes a torch.utils.data.DataLoader, not a {type(loader).__name__}. To feed "
            "the workers yourself, use session.rank and session.num_workers"
        )
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ConfigError(
            "the loader has a DistributedSampler, so its samples would be divided twice. Give the "
            "plain loader (shuffle=True in place of the sampler): shard() does the rest"
        )
    if num_workers > 1 and isinstance(loader.dataset, IterDataPipe):
        raise ConfigError(
            "a DataLoader divides an IterDataPipe over the workers by itself. Iterate the loader "
            "without shard(), or wrap the data in an IterableDataset"
        )


def _check_alike(loader: DataLoader[Any], agreement: Agreement, split: bool) -> None:
    """Refuses what would lose samples: workers with different data, or different cuts of it."""
    _check_same(agreement, _kind_of(loader), MismatchError, "the kind of loader given to shard()")
    _check_same(agreement, int(split), ConfigError, "split")
    _check_same(agreement, _num_samples(loader), MismatchError, "the size of the dataset")
    if split or is_stream(loader):
        stock = stock_batches(loader)
        size = loader.batch_size if stock is None else stock.batch_size
        _check_same(agreement, size or 0, ConfigError, "the batch size (split, or of a stream)")


def _check_same(
    agreement: Agreement, value: int, error: type[ConfigError | MismatchError], name: str
) -> None:
    values = agreement.gather_ints(value)
    if (rank := next((r for r, v in enumerate(values) if v != values[0]), None)) is not None:
        raise error(
            f"{name} must be the same on every worker, but is {values[0]} on worker 0 and "
            f"{values[rank]} on worker {rank}"
        )


def _num_samples(loader: DataLoader[Any]) -> int:
    """The size of a map-style dataset; -1 where there is none to rely on."""
    if is_stream(loader) or not hasattr(loader.dataset, "__len__"):
        return -1
    return len(loader.dataset)
