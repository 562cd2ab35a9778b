"""Read a map-style dataset: each worker loads only its own samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from parallax.data.batch import empty
from parallax.data.order import Listing, Order, WorkerGroup, order_of, stock_batches
from parallax.data.source import Epoch, Ready, rebuilt
from parallax.data.splitting import BatchSplitter, GlobalBatch, SampleSplitter


class IndexSource:
    """The batches of a map-style dataset."""

    def __init__(self, loader: DataLoader[Any], workers: WorkerGroup, split: bool) -> None:
        self._loader, self._workers = loader, workers
        self._order = order_of(loader)
        self._splitter = _splitter(loader, workers, split)
        self._shares = _Shares()
        self._inner = rebuilt(loader, loader.collate_fn, batch_sampler=self._shares)

    @property
    def kind(self) -> int:
        return self._order.kind

    def __len__(self) -> int:
        stock = stock_batches(self._loader)
        counted: Any = self._loader if stock is None else stock.sampler
        return self._splitter.num_steps(len(counted))

    def begin(self, drawn: Tensor | None, consumed: int) -> tuple[Epoch, Iterator[Ready]]:
        epoch = IndexEpoch(self._order, self._splitter, self._workers, drawn, consumed)
        self._shares.epoch = epoch
        # A resumed epoch made its draws before it was saved. [Note: same draws]
        with torch.random.fork_rng(devices=[], enabled=drawn is not None):
            batches = iter(self._inner)
        return epoch, epoch.ready(batches)


@dataclass
class IndexEpoch:
    """One pass over a map-style dataset."""

    order: Order
    splitter: SampleSplitter | BatchSplitter
    workers: WorkerGroup
    drawn: Tensor | None
    consumed: int

    @cached_property
    def _listing(self) -> Listing:
        if self.drawn is None:
            self.drawn = self.order.draw(self.workers)
        return self.order.read(self.drawn)

    def draw(self) -> None:
        self._listing  # noqa: B018 (made on first use)

    def shares(self) -> Iterator[list[int]]:
        """Iterate over the indices that the inner loader loads here, a list for each step."""
        listing = self._listing
        for step in self.splitter.steps(listing.lengths, self.consumed):
            yield listing.at(_to_load(step, self.workers.rank))
        self.order.close()

    def ready(self, batches: Iterator[Any]) -> Iterator[Ready]:
        rank = self.workers.rank
        for step in self.splitter.steps(self._listing.lengths, self.consumed):
            batch = next(batches)
            if step.counts[rank] == 0:
                part = _to_load(step, rank)
                batch = empty(batch, part.stop - part.start)
            yield Ready(batch, step.counts, step.consumed)
        # A plain loop does this at its end: it closes the order and stops the loader's processes.
        next(batches, None)

    def is_over(self, consumed: int) -> bool:
        return next(self.splitter.steps(self._listing.lengths, consumed), None) is None


class _Shares:
    """The inner loader's batch sampler. It outlives epochs, because persistent workers keep it."""

    epoch: IndexEpoch

    def __iter__(self) -> Iterator[list[int]]:
        return self.epoch.shares()


def _to_load(step: GlobalBatch, rank: int) -> slice:
    """Return this worker's part. If it has none, return samples of others, which `empty` removes.

    Two of them: with one it is hard to distinguish a list of samples from a list of fields.
    """
    if step.counts[rank] > 0:
        return step.part(rank)
    return slice(step.start, step.start + min(2, sum(step.counts)))


def _splitter(
    loader: DataLoader[Any], workers: WorkerGroup, split: bool
) -> SampleSplitter | BatchSplitter:
    stock = stock_batches(loader)
    if stock is None:
        return BatchSplitter(workers.num_workers, split)
    sizes = workers.gather_ints(stock.batch_size)
    if not split:
        return SampleSplitter(sum(sizes), sizes, stock.drop_last)
    return SampleSplitter(stock.batch_size, [1] * workers.num_workers, stock.drop_last)
