"""The interface between a sharded loader and where its batches come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils.data import DataLoader


class Ready(NamedTuple):
    """A batch that is ready to be yielded."""

    batch: Any
    counts: list[int]
    consumed: int


class Epoch(Protocol):
    """One pass over the data, or the rest of one."""

    @property
    def drawn(self) -> Tensor | None:
        """What the workers have agreed on; None before that."""

    def draw(self) -> None:
        """Agree on the order, before a sample is read. Collective the first time."""

    def is_over(self, consumed: int) -> bool: ...


class Source(Protocol):
    @property
    def kind(self) -> int: ...
    def __len__(self) -> int: ...
    def begin(self, drawn: Tensor | None, consumed: int) -> tuple[Epoch, Iterator[Ready]]:
        """Begin a new epoch, or with `drawn` continue one that was interrupted.

        Only the returned iterator refers to the loader's own, so that dropping it ends the
        loader's worker processes.
        """


def rebuilt(
    loader: DataLoader[Any], collate: Callable[[Any], Any], **batching: Any
) -> DataLoader[Any]:
    """Return the user's loader with another collate function and batching.

    `in_order` is not copied: the workers can only agree on batches that come in order.
    """
    if loader.pin_memory_device:
        batching["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        loader.dataset,
        collate_fn=collate,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **batching,
    )
