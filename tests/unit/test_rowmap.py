"""Rows to owners: every row has one place, the hottest are spread, a shard is a block of slots."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import parallax
from parallax.errors import ConfigError
from parallax.tables.rowmap import MAX_ROWS, RowMap, multiplier_of

SIZES = [1, 2, 3, 4, 5, 6, 12, 13, 30, 60, 97, 210]


def row_maps() -> list[RowMap]:
    """Even ones for fewer and more workers than rows, and some with unequal shards."""
    even = [RowMap.even(num_rows, n) for num_rows in SIZES for n in (1, 2, 3, 5, 16)]
    uneven = [
        RowMap(10, (0, 0, 9, 10), 7),
        RowMap(10, (0, 10, 10, 10), 3),
        RowMap(10, (0, 0, 0, 10), 3),
        RowMap(13, (0, 1, 13), 12),
    ]
    return even + uneven


@pytest.mark.parametrize("row_map", row_maps(), ids=str)
def test_every_row_has_one_owner_and_one_place(row_map: RowMap) -> None:
    ids = torch.arange(row_map.num_rows)
    slots = row_map.slots(ids)
    assert sorted(slots.tolist()) == ids.tolist()
    assert [row_map.slot(row) for row in ids.tolist()] == slots.tolist()
    assert row_map.ids(slots).tolist() == ids.tolist()
    owners, places = row_map.owners(slots), row_map.places(slots)
    for owner in range(row_map.num_workers):
        rows = row_map.ids_of(owner)
        assert len(rows) == row_map.size_of(owner) == int((owners == owner).sum())
        assert owners[rows].tolist() == [owner] * len(rows)
        assert places[rows].tolist() == list(range(len(rows)))
        assert (slots[rows] - row_map.first(owner)).tolist() == list(range(len(rows)))
    assert row_map.largest == max(map(row_map.size_of, range(row_map.num_workers)))


@pytest.mark.parametrize("row_map", row_maps(), ids=str)
def test_parts_together_are_the_whole(row_map: RowMap) -> None:
    whole = torch.randn(row_map.num_rows, 3, generator=torch.Generator().manual_seed(0))
    parts = [row_map.part(whole, owner) for owner in range(row_map.num_workers)]
    for owner, part in enumerate(parts):
        assert torch.equal(part, whole[row_map.ids_of(owner)])
        assert part.is_contiguous()
    assert torch.equal(row_map.whole(torch.cat(parts)), whole)


def test_a_part_is_a_contiguous_copy() -> None:
    whole = torch.zeros(3, 8).t()
    part = RowMap(8, (0, 8), 1).part(whole, 0)
    assert part.is_contiguous()
    part.fill_(1)
    assert not whole.any()


@pytest.mark.parametrize("row_map", row_maps(), ids=str)
def test_sorted_slots_are_grouped_by_owner(row_map: RowMap) -> None:
    slots = row_map.slots(torch.arange(0, row_map.num_rows, 2)).sort().values
    owners = row_map.owners(slots)
    assert owners.tolist() == sorted(owners.tolist())
    assert row_map.counts(slots) == owners.bincount(minlength=row_map.num_workers).tolist()
    assert row_map.counts(slots[:0]) == [0] * row_map.num_workers


@pytest.mark.parametrize("num_rows", [*range(1, 300), 2 * 3 * 5 * 7 * 11 * 13, 800_000, MAX_ROWS])
def test_the_multiplier_is_coprime_and_near_the_golden_ratio(num_rows: int) -> None:
    multiplier = multiplier_of(num_rows)
    assert math.gcd(multiplier, num_rows) == 1
    assert 1 <= multiplier <= max(1, num_rows - 1)
    assert abs(multiplier - 0.618034 * num_rows) < max(5, 1e-5 * num_rows)
    inverse = RowMap(num_rows, (0, num_rows), multiplier).inverse
    assert inverse * multiplier % num_rows == 1 % num_rows


def test_the_slot_of_a_row_does_not_depend_on_the_number_of_workers() -> None:
    ids = torch.arange(1000)
    slots = RowMap.even(1000, 1).slots(ids)
    for num_workers in (2, 7, 2000):
        assert torch.equal(RowMap.even(1000, num_workers).slots(ids), slots)


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 16])
def test_shards_are_even_by_default(num_rows: int, num_workers: int) -> None:
    row_map = RowMap.even(num_rows, num_workers)
    sizes = [row_map.size_of(owner) for owner in range(num_workers)]
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == row_map.largest


@pytest.mark.parametrize("num_rows", [800_000, 793_471, 2**20, 10_000])
def test_the_hottest_rows_are_spread_evenly(num_rows: int) -> None:
    row_map, hottest = RowMap.even(num_rows, 64), torch.arange(2000)
    counts = row_map.counts(row_map.slots(hottest).sort().values)
    assert max(counts) <= 1.1 * len(hottest) / 64


def test_the_largest_table_does_not_overflow() -> None:
    row_map = RowMap.even(MAX_ROWS, 3)
    rows = [0, 1, MAX_ROWS // 2, MAX_ROWS - 1]
    for dtype in (torch.int32, torch.int64):
        slots = row_map.slots(torch.tensor(rows, dtype=dtype))
        assert slots.dtype is torch.int64
        assert slots.tolist() == [row_map.slot(row) for row in rows]
        assert row_map.ids(slots).tolist() == rows


@pytest.mark.parametrize(
    ("num_rows", "boundaries", "multiplier", "text"),
    [
        (MAX_ROWS + 1, (0, MAX_ROWS + 1), 1, "rows; it can have up to 2147483647"),
        (10, (0, 10), 5, "not coprime to 10"),
        (10, (0, 10), 0, "multiplier 0"),
        (10, (0, 10), 11, "multiplier 11"),
        (10, (0, 9), 3, "boundaries"),
        (10, (1, 10), 3, "boundaries"),
        (10, (0, 6, 5, 10), 3, "boundaries"),
        (0, (0,), 1, "boundaries"),
    ],
)
def test_what_is_no_map_is_refused(
    num_rows: int, boundaries: tuple[int, ...], multiplier: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        RowMap(num_rows, boundaries, multiplier)


def test_a_table_without_rows() -> None:
    row_map = RowMap.even(0, 3)
    nothing = torch.empty(0, dtype=torch.int64)
    assert row_map.slots(nothing).tolist() == row_map.ids_of(1).tolist() == []
    assert row_map.counts(nothing) == [0, 0, 0]
    assert row_map.largest == 0


def test_a_table_of_too_many_rows_is_refused() -> None:
    model = nn.Embedding(2**31, 2, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ConfigError, match="table 'weight' has 2147483648 rows, but a sharded"):
        parallax.parallelize(model, optimizer, lazy=True)
