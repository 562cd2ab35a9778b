"""The order of an epoch's samples, on which the workers agree once an epoch.

[Note: same draws] Worker 0 takes from the random generators what a plain DataLoader takes, in the
same order (the iterator's base seed, then the sampler), so that any number of workers sees the
permutation that one process without Parallax sees after the same `torch.manual_seed`.

What was drawn is a 1-D tensor of integers, as small as possible. It is broadcast and saved in
checkpoints, and `read` turns it into the indices on every worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from parallax.errors import ConfigError


class WorkerGroup(Protocol):
    """The collective operations that sharing data needs."""

    @property
    def rank(self) -> int: ...
    @property
    def num_workers(self) -> int: ...

    def broadcast_ints(self, values: Tensor | None) -> Tensor:
        """Worker 0 passes a 1-D int64 CPU tensor, the others None; all get it."""

    def gather_ints(self, value: int) -> list[int]:
        """One integer from each worker, in rank order."""


class Listing(NamedTuple):
    """The epoch's sample indices, and how they are grouped (one group, or the ready batches)."""

    indices: range | Tensor
    lengths: list[int]

    def at(self, part: slice) -> list[int]:
        indices = self.indices[part]
        return list(indices) if isinstance(indices, range) else indices.tolist()


class Order(Protocol):
    kind: ClassVar[int]
    "Identifies the kind of order in checkpoints, and between workers."

    def draw(self, workers: WorkerGroup) -> Tensor:
        """Agree on an order. Collective."""

    def read(self, drawn: Tensor) -> Listing:
        """Return the indices of an order that was drawn."""

    def close(self) -> None:
        """Called when the epoch's last index has been handed out."""


def broadcast(workers: WorkerGroup, values: Tensor) -> Tensor:
    """Return worker 0's `values` on every worker. Collective."""
    return workers.broadcast_ints(values if workers.rank == 0 else None)


class InSequence:
    kind: ClassVar[int] = 0

    def __init__(self, sampler: SequentialSampler) -> None:
        self._data = sampler.data_source

    def draw(self, workers: WorkerGroup) -> Tensor:
        return torch.empty(0, dtype=torch.int64)

    def read(self, drawn: Tensor) -> Listing:
        return Listing(range(len(self._data)), [len(self._data)])

    def close(self) -> None: ...


class SeedShuffled:
    """`shuffle=True`: a permutation made from a seed of the global generator."""

    kind: ClassVar[int] = 1

    def __init__(self, sampler: RandomSampler) -> None:
        self._data = sampler.data_source

    def draw(self, workers: WorkerGroup) -> Tensor:
        # Every worker draws, so that generators with equal states stay equal.
        return broadcast(workers, torch.empty(1, dtype=torch.int64).random_())

    def read(self, drawn: Tensor) -> Listing:
        generator = torch.Generator().manual_seed(int(drawn.item()))
        num_samples = len(self._data)
        return Listing(torch.randperm(num_samples, generator=generator), [num_samples])

    def close(self) -> None: ...


class GeneratorShuffled:
    """`shuffle=True, generator=…`: a permutation made from the state of the user's generator.

    Reading sets the generator of every worker to the state of worker 0's, also after a restore. So
    later epochs are those of a run that was not interrupted.
    """

    kind: ClassVar[int] = 2

    def __init__(self, sampler: RandomSampler) -> None:
        self._data, self._generator = sampler.data_source, sampler.generator

    def draw(self, workers: WorkerGroup) -> Tensor:
        return broadcast(workers, self._generator.get_state().view(torch.int64))

    def read(self, drawn: Tensor) -> Listing:
        self._generator.set_state(drawn.view(torch.uint8))
        num_samples = len(self._data)
        return Listing(torch.randperm(num_samples, generator=self._generator), [num_samples])

    def close(self) -> None:
        # RandomSampler draws one more permutation at its end, which it does not use.
        torch.randperm(len(self._data), generator=self._generator)


class SamplerListed:
    """Any other sampler: worker 0 lists it and broadcasts the list."""

    kind: ClassVar[int] = 3

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler

    def draw(self, workers: WorkerGroup) -> Tensor:
        drawn = workers.broadcast_ints(self._packed() if workers.rank == 0 else None)
        if drawn[0] < 0:
            raise ConfigError(
                f"{type(self._sampler).__name__} gives indices that are not integers, and only "
                "integers can be agreed on. Let it give positions 0, 1, 2, … and look the keys up "
                "in the dataset's __getitem__"
            )
        return drawn

    def read(self, drawn: Tensor) -> Listing:
        begin = 1 + int(drawn[0])
        return Listing(drawn[begin:], drawn[1:begin].tolist())

    def close(self) -> None: ...

    def _groups(self) -> list[list[Any]]:
        return [list(self._sampler)]

    def _packed(self) -> Tensor:
        """Return the number of groups, their lengths, their indices; -1 if an index is no integer.

        The -1 is broadcast too, so that all workers raise instead of waiting for worker 0.
        """
        groups = self._groups()
        indices = _as_ints([*chain.from_iterable(groups)])
        if indices is None:
            return torch.tensor([-1])
        return torch.cat([torch.tensor([len(groups), *map(len, groups)]), indices])


class BatchesListed(SamplerListed):
    """The user's own batch sampler: worker 0 lists its batches."""

    kind: ClassVar[int] = 4

    def _groups(self) -> list[list[Any]]:
        return [list(batch) for batch in self._sampler]


def _as_ints(indices: list[Any]) -> Tensor | None:
    try:
        values = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        return None
    if indices and (values.dim() != 1 or values.is_floating_point() or values.is_complex()):
        return None
    return values.to(torch.int64)


def stock_batches(loader: DataLoader[Any]) -> BatchSampler | None:
    """Return the loader's batch sampler if it is torch's own, which groups samples in order."""
    batches = loader.batch_sampler
    return batches if type(batches) is BatchSampler else None


def order_of(loader: DataLoader[Any]) -> Order:
    """Return the kind of order that a loader has."""
    batches = stock_batches(loader)
    if batches is None:
        assert loader.batch_sampler is not None, "a loader without batches is a stream"
        return BatchesListed(loader.batch_sampler)
    # The exact types: a subclass may do anything.
    sampler = batches.sampler
    if type(sampler) is SequentialSampler:
        return InSequence(sampler)
    if type(sampler) is RandomSampler and _is_permutation(sampler):
        return SeedShuffled(sampler) if sampler.generator is None else GeneratorShuffled(sampler)
    return SamplerListed(sampler)


def _is_permutation(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
