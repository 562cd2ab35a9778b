"""Rows to owners: every row has one, the hottest are spread, sorted slots lie by owner."""

from __future__ import annotations

import pytest
import torch

from parallax.shard import RowMap, merged


@pytest.mark.parametrize("num_rows", [1, 5, 12, 13])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_every_row_has_one_owner_and_one_place(num_rows: int, num_workers: int) -> None:
    row_map = RowMap(num_rows, num_workers)
    ids = torch.arange(num_rows)
    slots = row_map.slots(ids)
    assert len(slots.unique()) == num_rows
    found = [row_map.ids_of(owner) for owner in range(num_workers)]
    assert sorted(torch.cat(found).tolist()) == ids.tolist()
    for owner, rows in enumerate(found):
        assert len(rows) == row_map.size_of(owner)
        assert row_map.places(row_map.slots(rows)).tolist() == list(range(len(rows)))
        assert row_map.part(ids, owner).tolist() == rows.tolist()
    assert [row_map.slot(int(i)) for i in ids] == slots.tolist()


def test_sorted_slots_lie_by_owner() -> None:
    row_map = RowMap(10, 3)
    slots = row_map.slots(torch.tensor([0, 9, 3, 1, 5])).sort().values
    assert row_map.counts(slots) == [3, 1, 1]
    assert row_map.counts(slots[:0]) == [0, 0, 0]
    assert row_map.counts(row_map.slots(torch.arange(10)).sort().values) == [4, 3, 3]


def test_the_head_of_a_vocabulary_is_spread() -> None:
    row_map = RowMap(1000, 4)
    assert row_map.counts(row_map.slots(torch.arange(100)).sort().values) == [25] * 4


def test_merged_sums_rows_of_equal_slots() -> None:
    slots, values = merged(
        [torch.tensor([1, 4]), torch.tensor([4, 2])],
        [torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])],
    )
    assert slots.tolist() == [1, 2, 4]
    assert values.tolist() == [[1.0], [20.0], [12.0]]
