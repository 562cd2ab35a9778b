"""Which Debian packages need which: records from the lists that this machine's apt has.

Every worker reads them for itself, so on many hosts the lists must be the same.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator

import torch
from records import Records, Vocabulary
from torch import Tensor

MOST_TAGS = 8
MIN_PAIRS = 20

_NAME = re.compile(r"\s*([a-z0-9][a-z0-9+.-]*)")
_FIELDS = ["Package", "Source", "Section", "Maintainer", "Tag", "Depends", "Recommends"]
_FIELDS += ["Installed-Size", "Size"]

Package = dict[str, str]


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
    described = [nothing] + [known.get(name, nothing) for name in names]
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
