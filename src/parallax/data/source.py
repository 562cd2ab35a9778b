"""Where the batches of an epoch come from, as the loader sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils.data import DataLoader


class Ready(NamedTuple):
    """A batch about to be yielded."""

    batch: Any
    counts: list[int]
    consumed: int


class Epoch(Protocol):
    """What is known of one pass over the data, or the rest of one."""

    @property
    def drawn(self) -> Tensor | None:
        """What was agreed on; None as long as nothing was."""

    def draw(self) -> None:
        """Agree on the order, if that is yet to be done; before a sample is read."""

    def is_over(self, consumed: int) -> bool: ...


class Source(Protocol):
    @property
    def kind(self) -> int: ...
    def __len__(self) -> int: ...
    def begin(self, drawn: Tensor | None, consumed: int) -> tuple[Epoch, Iterator[Ready]]:
        """A new epoch, or with `drawn` the rest of one that was interrupted.

        Only the iterator holds on to the loader's own: dropping it must end the loader's workers.
        """


def rebuilt(
    loader: DataLoader[Any], collate: Callable[[Any], Any], **batching: Any
) -> DataLoader[Any]:
    """The user's loader with another collate function and batching.

    Not `in_order`: the workers can only agree on batches that come in order.
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
