"""The shape of every workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

POOL = 32
"""Different batches of a worker; after these the first comes again."""
NUM_PIECES = 4
"""In which an emulated accelerator hands out gradients."""
T = TypeVar("T")
TILE_ROWS = 1009
"""Tables repeat this many rows: as good as any others to time, and a shard is made alone."""


@dataclass(frozen=True)
class Table:
    """A table of which a step looks up some rows."""

    name: str
    num_rows: int
    width: int

    @property
    def size_bytes(self) -> int:
        return 4 * self.num_rows * self.width

    def start(self, first: int = 0, last: int | None = None) -> NDArray[np.float32]:
        """The rows `first` to `last` as training begins, in every engine."""
        tile = np.random.default_rng(7).normal(0, self.width**-0.5, (TILE_ROWS, self.width))
        rows = np.arange(first, self.num_rows if last is None else last) % TILE_ROWS
        return tile.astype(np.float32)[rows]


class Batch(NamedTuple):
    """One worker's samples of a step."""

    ids: list[NDArray[np.int64]]
    """What is looked up in each table, in the workload's order."""
    others: list[NDArray[np.generic]]
    """What else the layers take."""


class Workload:
    """Tables, and layers that make a loss of their rows.

    A subclass has `tables`, `samples` (what a worker's batch counts, and their unit), `compute_ms`
    (what an emulated accelerator takes for the layers of a batch), `learning_rate`, `batch` and
    `layers`. It trains with Adagrad, or with AdamW if it has `adamw`.
    """

    name: str
    tables: tuple[Table, ...] = ()
    samples: tuple[int, str]
    compute_ms: float
    learning_rate: float = 0.03
    accumulator: float = 1e-5
    """Adagrad's sum of squares as training begins."""
    adamw: dict[str, object] | None = None
    """Options of torch.optim.AdamW; it takes no sparse gradients."""

    def batch(self, step: int, rank: int) -> Batch:
        raise NotImplementedError

    def layers(self) -> nn.Module:
        """A module of (rows of each table, others) → the mean loss, the same on every worker."""
        raise NotImplementedError

    def check_adagrad(self) -> None:
        """Refuse an engine that trains with Adagrad only."""
        if self.adamw is not None:
            raise ValueError(
                f"{self.name} trains with AdamW: take the engines parallax, parallax-lazy, "
                "ddp-dense and alone"
            )

    @property
    def table_bytes(self) -> int:
        return sum(table.size_bytes for table in self.tables)

    @staticmethod
    def random(step: int, rank: int) -> np.random.Generator:
        return np.random.default_rng([step, rank])


def log_uniform(
    random: np.random.Generator, num_rows: int, shape: int | tuple[int, ...]
) -> NDArray[np.int64]:
    """Ids as words have them: an id's chance falls with its rank (Zipf)."""
    drawn = np.exp(random.random(shape) * np.log(num_rows + 1.0)) - 1
    ids: NDArray[np.int64] = np.minimum(drawn.astype(np.int64), num_rows - 1)
    return ids


def pieces(values: Sequence[T], size: Callable[[T], int], count: int = NUM_PIECES) -> list[list[T]]:
    """Consecutive ones of about the same size together; the first is never empty."""
    found: list[list[T]] = [[] for _ in range(count)]
    total, before = sum(map(size, values)), 0
    for value in values:
        found[count * before // total].append(value)
        before += size(value)
    return found
