"""One slot space for several tables: what is deduplicated, counted and ordered at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parallax.tables.rowmap import RowMap
from parallax.tables.space import Keys, SlotSpace, by_owner

MAPS = [RowMap.even(10, 3), RowMap.even(1, 3), RowMap(7, (0, 0, 6, 7), 4), RowMap.even(50, 3)]
CPU = torch.device("cpu")


def make_space(rank: int = 0, paddings: tuple[tuple[int, ...], ...] = ()) -> SlotSpace:
    return SlotSpace("abcd", MAPS, [1, 3], rank, CPU, paddings)


def make_ids() -> tuple[list[int], list[torch.Tensor]]:
    """Lookups of tables in any order, one of them twice, one with no ids."""
    generator = torch.Generator().manual_seed(0)
    tables = [3, 0, 2, 3, 1]
    sizes = [40, 5, 0, 7, 2]
    return tables, [
        torch.randint(MAPS[t].num_rows, (size,), generator=generator)
        for t, size in zip(tables, sizes, strict=True)
    ]


def test_a_request_has_each_row_once_in_the_order_of_the_tables() -> None:
    space, (tables, ids) = make_space(), make_ids()
    request = space.request(tables, ids)
    firsts = np.cumsum([0, *(m.num_rows for m in MAPS)])
    wanted = {
        int(firsts[t] + MAPS[t].slot(row))
        for t, each in zip(tables, ids, strict=True)
        for row in each.tolist()
    }
    assert request.keys.tolist() == sorted(wanted)
    assert not request.is_faulty
    for t, row_map in enumerate(MAPS):
        slots = request.keys[request.starts[t] : request.starts[t + 1]] - int(firsts[t])
        assert request.counts[t].tolist() == row_map.counts(slots)


def test_places_lead_back_to_the_ids() -> None:
    space, (tables, ids) = make_space(), make_ids()
    request = space.request(tables, ids)
    pieces = request.places.split([len(each) for each in ids])
    for t, each, places in zip(tables, ids, pieces, strict=True):
        slots = request.keys[places] - int(space.first_keys[t])
        assert MAPS[t].ids(slots).tolist() == each.tolist()


@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_a_bad_id_is_seen(bad: int) -> None:
    assert make_space().request([2, 0], [torch.tensor([bad, 0]), torch.tensor([1])]).is_faulty


def test_indices_are_the_places_in_the_storage_of_each_owner() -> None:
    space, (tables, ids) = make_space(), make_ids()
    request = space.request(tables, ids)
    indices, owners = space.indices(request), space.owners(request.counts)
    for owner in range(3):
        lines = [
            (t, slot)
            for t, row_map in enumerate(MAPS)
            for slot in range(row_map.first(owner), row_map.first(owner) + row_map.size_of(owner))
        ]
        for index, key in zip(
            indices[owners == owner].tolist(), request.keys[owners == owner].tolist(), strict=True
        ):
            t, slot = lines[index]
            assert key == int(space.first_keys[t]) + slot


def test_rows_are_ordered_by_owner_for_the_way() -> None:
    counts = np.array([[2, 0, 1], [0, 3, 1]])
    order = by_owner(counts, CPU)
    assert order is not None
    labels = [f"{t}{o}" for t in range(2) for o in range(3) for _ in range(counts[t, o])]
    moved = [""] * len(labels)
    for label, place in zip(labels, order.tolist(), strict=True):
        moved[place] = label
    assert moved == ["00", "00", "11", "11", "11", "02", "12"]
    assert by_owner(counts[:1], CPU) is None


def test_padding_rows_are_found_in_a_request() -> None:
    space = make_space(paddings=((3,), (), (0, 5)))
    request = space.request([2, 0], [torch.tensor([5, 1]), torch.tensor([4])])
    at = {row: int(request.paddings[n]) for row, n in space.padding_of.items()}
    assert at[0, 3] == at[2, 0] == -1
    slot = int(request.keys[at[2, 5]]) - int(space.first_keys[2])
    assert MAPS[2].ids(torch.tensor([slot])).tolist() == [5]


def test_an_empty_request() -> None:
    request = make_space(paddings=((3,),)).request([0], [torch.empty(0, dtype=torch.int64)])
    assert len(request.keys) == 0
    assert request.counts.sum() == 0
    assert request.paddings.tolist() == [-1]


def test_keys_are_counted_by_group() -> None:
    space = make_space()
    counts = space.count(torch.arange(space.num_keys))
    assert space.group_sums(counts).sum(1).tolist() == [10, 58]
    everything = Keys(torch.arange(space.num_keys), counts)
    assert everything.starts.tolist() == [0, 10, 11, 18, 68]
