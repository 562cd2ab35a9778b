"""Read a stream: every worker reads all batches of the loader and keeps its part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from parallax.data.batch import count, empty, take
from parallax.data.order import WorkerGroup, broadcast
from parallax.data.source import Epoch, Ready, rebuilt
from parallax.data.splitting import BatchSplitter, GlobalBatch


def is_stream(loader: DataLoader[Any]) -> bool:
    """Return whether worker 0 cannot list the batches, or must read them to know their sizes."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return True
    return not _iterates_as_stock(loader) or not _has_length(loader)


class StreamSource:
    """The batches of an iterable dataset, or of a loader with its own iteration."""

    kind: ClassVar[int] = 5

    def __init__(self, loader: DataLoader[Any], workers: WorkerGroup, split: bool) -> None:
        self._loader, self._workers = loader, workers
        self._splitter = BatchSplitter(workers.num_workers, split)
        self._batches = _counted_batches(loader)
        sampler_generator = getattr(loader.sampler, "generator", None)
        self._generator = loader.generator or sampler_generator or torch.default_generator

    def __len__(self) -> int:
        num_batches = len(self._loader)
        if self._drops_incomplete:
            return num_batches // self._workers.num_workers
        return self._splitter.num_steps(num_batches)

    def begin(self, drawn: Tensor | None, consumed: int) -> tuple[Epoch, Iterator[Ready]]:
        if drawn is None:
            drawn = broadcast(self._workers, self._generator.get_state().view(torch.int64))
        with self._drawing_from(drawn):
            batches = iter(self._batches)
            # Samplers and generator functions draw at the first batch, not before.
            batches = chain(list(islice(batches, 1)), batches)
        deque(islice(batches, consumed), maxlen=0)
        return StreamEpoch(drawn), self._ready(batches, consumed)

    def _ready(self, batches: Iterator[tuple[int, Any]], consumed: int) -> Iterator[Ready]:
        size = 1 if self._splitter.split else self._splitter.num_workers
        while group := list(islice(batches, size)):
            if len(group) < size and self._drops_incomplete:
                return
            counts = self._splitter.counts([num_samples for num_samples, _ in group])
            consumed += len(group)
            yield Ready(_own(group, counts, self._workers.rank), counts, consumed)

    @property
    def _drops_incomplete(self) -> bool:
        return self._loader.drop_last and not self._splitter.split

    @contextmanager
    def _drawing_from(self, drawn: Tensor) -> Iterator[None]:
        """Make a stream that draws random numbers at its start the same on every worker.

        Afterwards the global generator has this worker's own state again, unless the workers'
        generators had the same state before, and so still have. [Note: same draws]
        """
        state = drawn.view(torch.uint8)
        own = self._generator.get_state()
        self._generator.set_state(state)
        try:
            yield
        finally:
            is_shared = self._generator is torch.default_generator
            if is_shared and not torch.equal(own, state):
                self._generator.set_state(own)


@dataclass(frozen=True)
class StreamEpoch:
    drawn: Tensor

    def draw(self) -> None: ...

    def is_over(self, consumed: int) -> bool:
        return False  # Only reading further would show it.


def _own(group: list[tuple[int, Any]], counts: list[int], rank: int) -> Any:
    num_samples, batch = group[rank] if rank < len(group) else group[0]
    if counts[rank] == num_samples:
        return batch
    if counts[rank] == 0:
        return empty(batch, num_samples)
    return take(batch, GlobalBatch(0, counts, 0).part(rank), num_samples)


@dataclass(frozen=True)
class Counted:
    """A collate function that also returns the number of samples."""

    collate: Callable[[Any], Any]
    is_batched: bool

    def __call__(self, samples: Any) -> tuple[int, Any]:
        batch = self.collate(samples)
        return len(samples) if self.is_batched else count(batch), batch


class _CountedAfter:
    """The batches of a loader with its own iteration, counted as they are read."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((count(batch), batch) for batch in self._loader)


def _counted_batches(loader: DataLoader[Any]) -> Iterable[tuple[int, Any]]:
    if not _iterates_as_stock(loader):
        return _CountedAfter(loader)
    collate = Counted(loader.collate_fn, is_batched=loader.batch_sampler is not None)
    if isinstance(loader.dataset, IterableDataset):
        return rebuilt(loader, collate, batch_size=loader.batch_size, drop_last=loader.drop_last)
    if loader.batch_sampler is None:
        return rebuilt(loader, collate, batch_size=None, sampler=loader.sampler)
    return rebuilt(loader, collate, batch_sampler=loader.batch_sampler)


def _iterates_as_stock(loader: DataLoader[Any]) -> bool:
    cls = type(loader)
    return cls.__iter__ is DataLoader.__iter__ and cls._get_iterator is DataLoader._get_iterator


def _has_length(loader: DataLoader[Any]) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
