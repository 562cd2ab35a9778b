"""ShardedLoader, which `session.shard(loader)` returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterDataPipe

from parallax.data.indexed import IndexSource
from parallax.data.order import WorkerGroup, order_of, stock_batches
from parallax.data.random_state import random_state
from parallax.data.source import Epoch, Ready, Source
from parallax.data.stream import StreamSource, is_stream
from parallax.data.usage import LoaderUsage
from parallax.errors import CheckpointError, ConfigError, MismatchError

_numbers = itertools.count()
"""Number the sharded loaders of a process, and the passes over them."""

Pass = tuple[int, int]
"""A loader's number, and the number of the pass over it."""


class BatchConsumer(Protocol):
    """Who trains on the batches of a loader, and prefetches rows for them."""

    def prefetches_here(self) -> bool:
        """Whether rows are prefetched for loaders that this thread reads."""

    def reads_ahead(self, loader: int) -> bool:
        """Whether to read a loader one batch further; the same on all workers."""

    def declare_random(self, loader: int) -> None:
        """Note that reading this loader draws random numbers in this process."""

    def declare_ids(self, loader: int, ids: dict[str, Callable[[Any], Any]]) -> None:
        """Note how the script computes the ids of some tables from a batch."""

    def begin_batch(
        self, of: Pass, batch: Any, following: tuple[Any, ...], counts: list[int]
    ) -> None:
        """Prepare for the batch that the script gets now. Collective if rows are prefetched.

        `following` is the batch after it, if it has been read. `counts` are all workers' numbers
        of samples, in rank order.
        """

    def end_data(self) -> None:
        """Note the end of a pass."""


class ShardedLoader:
    """This worker's share of every global batch of a DataLoader; each `for` is an epoch.

    All workers iterate together and make the same number of steps. No sample of an epoch is lost
    or seen twice: a worker that has none left in the last step gets a batch with no rows. With one
    worker this is the loader itself, with a position that can be restored.

    By default the loader's batch size is the worker's, and may differ between workers; with
    `split` it is the size of the global batch. Worker 0 decides the order of an epoch: with
    `shuffle=True` it is the order of one process that was seeded like worker 0.

    Iterable datasets (and loaders with no length, with `batch_size=None` or with their own
    iteration) are read completely by every worker, which keeps every N-th batch or, with `split`,
    a part of each. They must give the same batches on every worker. So the dataset must not shard
    itself by rank, and if it draws random numbers throughout an epoch, it must use its own seeded
    generator. Randomness of torch at the start of an epoch and in loader workers is made the same.

    `next()` is collective: it may agree on the order of samples, prefetch rows and save.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        workers: WorkerGroup,
        *,
        split: bool,
        consumer: BatchConsumer,
        usage: LoaderUsage | None = None,
        ids: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        _check_loader(loader, workers.num_workers)
        _check_alike(loader, workers, split)
        self.epoch = 0
        self.usage = usage or LoaderUsage()
        self._consumer = consumer
        self._number = next(_numbers)
        self._draws = False
        """Reading draws random numbers in this process."""
        self._source = _source_of(loader, workers, split)
        self._num_samples = _num_samples(loader)
        if ids:
            consumer.declare_ids(self._number, dict(ids))
        self._place: _Place | None = None
        self._saved: dict[str, int | Tensor] | None = None

    def __len__(self) -> int:
        """Return the number of steps of a full epoch."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        if self.usage.take_done():
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
        self.usage.begin()
        place.epoch.draw()
        this_pass = (self._number, next(_numbers))
        try:
            following: tuple[Ready, ...] = ()
            while (found := self._fetched(ready, following)) is not None:
                num_steps += 1
                following = self._read_ahead(ready, place.epoch.is_over(found.consumed))
                self.usage.before_batch()
                place.consumed = found.consumed
                ahead = tuple(each.batch for each in following)
                self._consumer.begin_batch(this_pass, found.batch, ahead, found.counts)
                yield found.batch
        finally:
            if self._place is place:
                self.usage.leave()
        self._consumer.end_data()
        if self._place is place:
            self._place = None
            self.epoch += 1
        if is_resumed and num_steps == 0:
            yield from self  # it was saved at the epoch's very end

    def _fetched(self, ready: Iterator[Ready], following: tuple[Ready, ...]) -> Ready | None:
        self.usage.before_fetch(self.epoch)
        return following[0] if following else self._read(ready)

    def _read_ahead(self, ready: Iterator[Ready], is_last: bool) -> tuple[Ready, ...]:
        """Return the batch after the one that is handed out, if its rows are prefetched."""
        if is_last or not self._consumer.reads_ahead(self._number):
            return ()
        found = self._read(ready)
        return () if found is None else (found,)

    def _read(self, ready: Iterator[Ready]) -> Ready | None:
        """Return the next batch. A loader whose reading draws random numbers is not read ahead."""
        if self._draws or not self._consumer.prefetches_here():
            return next(ready, None)
        before = random_state()
        found = next(ready, None)
        if before != random_state():
            self._draws = True
            self._consumer.declare_random(self._number)
        return found

    def state_dict(self) -> dict[str, int | Tensor]:
        """Return the position after the batch yielded last: integers, the same on every worker.

        It fits any number of workers. "order" is what the epoch's order is made of: a seed, the
        state of a generator, or all indices where nothing shorter describes them. For a pass that
        the script has left for good, it is the beginning of the next one.
        """
        if self._saved is not None:
            return dict(self._saved)
        place = self._place
        if self.usage.is_over:
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
        """Let the next `for` continue where `state` was taken. Call it on every worker."""
        self.check_fits(state)
        self.epoch = int(state["epoch"])
        self._place = None
        self._saved = dict(state) if "order" in state else None

    def check_fits(self, state: Mapping[str, int | Tensor]) -> None:
        """Raise what `load_state_dict` would raise, and change nothing."""
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
    """The position of one iteration. An older iteration of the same loader keeps its own."""

    def __init__(self, epoch: Epoch, consumed: int) -> None:
        self.epoch, self.consumed = epoch, consumed


def _restored(saved: Mapping[str, int | Tensor] | None) -> tuple[int, Tensor | None]:
    if saved is None:
        return 0, None
    # A checkpoint may have been loaded onto a device.
    return int(saved["consumed"]), torch.as_tensor(saved["order"]).cpu()


def _source_of(loader: DataLoader[Any], workers: WorkerGroup, split: bool) -> Source:
    if is_stream(loader):
        return StreamSource(loader, workers, split)
    return IndexSource(loader, workers, split)


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


def _check_alike(loader: DataLoader[Any], workers: WorkerGroup, split: bool) -> None:
    """Refuse what would lose samples: workers with different data, or different batch sizes."""
    _check_same(workers, _kind_of(loader), MismatchError, "the kind of loader given to shard()")
    _check_same(workers, int(split), ConfigError, "split")
    _check_same(workers, _num_samples(loader), MismatchError, "the size of the dataset")
    if split or is_stream(loader):
        stock = stock_batches(loader)
        size = loader.batch_size if stock is None else stock.batch_size
        _check_same(workers, size or 0, ConfigError, "the batch size (split, or of a stream)")


def _check_same(
    workers: WorkerGroup, value: int, error: type[ConfigError | MismatchError], name: str
) -> None:
    values = workers.gather_ints(value)
    if (rank := next((r for r, v in enumerate(values) if v != values[0]), None)) is not None:
        raise error(
            f"{name} must be the same on every worker, but is {values[0]} on worker 0 and "
            f"{values[rank]} on worker {rank}"
        )


def _num_samples(loader: DataLoader[Any]) -> int:
    """Return the size of a map-style dataset; -1 where it is not known."""
    if is_stream(loader) or not hasattr(loader.dataset, "__len__"):
        return -1
    return len(loader.dataset)
