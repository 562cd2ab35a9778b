"""A map-style dataset as source: each worker loads only its own samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from parallax.data.batch import empty
from parallax.data.cut import BatchCut, SampleCut, Step
from parallax.data.order import Agreement, Listing, Order, order_of, stock_batches
from parallax.data.source import Epoch, Ready, rebuilt


class IndexSource:
    """A map-style dataset: this worker loads only its own samples."""

    def __init__(self, loader: DataLoader[Any], agreement: Agreement, split: bool) -> None:
        self._loader, self._agreement = loader, agreement
        self._order = order_of(loader)
        self._cut = _cut(loader, agreement, split)
        self._shares = _Shares()
        self._inner = rebuilt(loader, loader.collate_fn, batch_sampler=self._shares)

    @property
    def kind(self) -> int:
        return self._order.kind

    def __len__(self) -> int:
        stock = stock_batches(self._loader)
        counted: Any = self._loader if stock is None else stock.sampler
        return self._cut.num_steps(len(counted))

    def begin(self, drawn: Tensor | None, consumed: int) -> tuple[Epoch, Iterator[Ready]]:
        epoch = IndexEpoch(self._order, self._cut, self._agreement, drawn, consumed)
        self._shares.epoch = epoch
        # A resumed epoch made its draws before it was saved. [Note: same draws]
        with torch.random.fork_rng(devices=[], enabled=drawn is not None):
            batches = iter(self._inner)
        return epoch, epoch.ready(batches)


@dataclass
class IndexEpoch:
    order: Order
    cut: SampleCut | BatchCut
    agreement: Agreement
    drawn: Tensor | None
    consumed: int

    @cached_property
    def _listing(self) -> Listing:
        if self.drawn is None:
            self.drawn = self.order.draw(self.agreement)
        return self.order.read(self.drawn)

    def draw(self) -> None:
        self._listing  # noqa: B018 (made on first use)

    def shares(self) -> Iterator[list[int]]:
        """The indices that the inner loader loads on this worker, a list for each step."""
        listing = self._listing
        for step in self.cut.steps(listing.lengths, self.consumed):
            yield listing.at(_to_load(step, self.agreement.rank))
        self.order.close()

    def ready(self, batches: Iterator[Any]) -> Iterator[Ready]:
        rank = self.agreement.rank
        for step in self.cut.steps(self._listing.lengths, self.consumed):
            batch = next(batches)
            if step.counts[rank] == 0:
                part = _to_load(step, rank)
                batch = empty(batch, part.stop - part.start)
            yield Ready(batch, step.counts, step.consumed)
        # As a plain loop does at its end: it closes the order and stops the loader's workers.
        next(batches, None)

    def is_over(self, consumed: int) -> bool:
        return next(self.cut.steps(self._listing.lengths, consumed), None) is None


class _Shares:
    """The inner loader's batch sampler; outlives the epochs, as persistent workers do."""

    epoch: IndexEpoch

    def __iter__(self) -> Iterator[list[int]]:
        return self.epoch.shares()


def _to_load(step: Step, rank: int) -> slice:
    """This worker's part; if it has none, some of the others' samples, to be emptied again.

    Two of them, for with one it would be hard to tell a list of samples from a list of fields.
    """
    if step.counts[rank] > 0:
        return step.part(rank)
    return slice(step.start, step.start + min(2, sum(step.counts)))


def _cut(loader: DataLoader[Any], agreement: Agreement, split: bool) -> SampleCut | BatchCut:
    stock = stock_batches(loader)
    if stock is None:
        return BatchCut(agreement.num_workers, split)
    sizes = agreement.gather_ints(stock.batch_size)
    if not split:
        return SampleCut(sum(sizes), sizes, stock.drop_last)
    return SampleCut(stock.batch_size, [1] * agreement.num_workers, stock.drop_last)
