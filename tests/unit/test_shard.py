"""Rows of several tables in the order of their owners, and sums of equal rows."""

from __future__ import annotations

import pytest
import torch

from parallax.exchange.request import Request
from parallax.shard import Merge, joined, laid_out, merged, put_rows, regrouped
from parallax.tables.rowmap import RowMap

MAPS = [
    RowMap.even(10, 3),
    RowMap.even(1, 3),
    RowMap(7, (0, 0, 6, 7), 4),
    RowMap.even(50, 3),
]


def test_several_tables_are_laid_out_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = MAPS
    slots = [
        m.slots(torch.randint(m.num_rows, (size,), generator=generator)).unique()
        for m, size in zip(maps, (4, 1, 0, 40), strict=True)
    ]
    for chosen in (slice(0, 4), slice(1, 3), slice(2, 3)):
        counts, places = laid_out(maps[chosen], slots[chosen])
        each = list(zip(maps[chosen], slots[chosen], strict=True))
        assert counts.tolist() == [m.counts(s) for m, s in each]
        assert places.tolist() == torch.cat([m.places(s) for m, s in each]).tolist()


def test_parts_are_joined_without_a_copy_where_they_lie_together() -> None:
    whole = torch.arange(24.0).reshape(6, 2, 2)
    for cuts, is_view in (
        ([whole[1:3], whole[3:4], whole[4:4], whole[4:]], True),
        ([whole[2:3]], True),
        ([whole[1:3], whole[4:]], False),
        ([whole[3:], whole[:3]], False),
        ([whole[1:3], whole[3:4].clone()], False),
        ([whole[::2], whole[1::2]], False),
        ([whole.transpose(1, 2)], False),
    ):
        found = joined(cuts)
        assert torch.equal(found, torch.cat(cuts))
        first = whole.untyped_storage().data_ptr()
        assert (found.untyped_storage().data_ptr() == first) == is_view


def test_requests_of_several_tables_are_those_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = MAPS
    ids = [
        torch.randint(m.num_rows, (size,), generator=generator)
        for m, size in zip(maps, (4, 3, 0, 40), strict=True)
    ]
    together = Request.of_all(ids, maps)
    assert together is not None
    for one, each, row_map in zip(together, ids, maps, strict=True):
        alone = Request.of(each, row_map, wraps=False, device=each.device)
        assert one.slots.tolist() == alone.slots.tolist()
        assert one.places.tolist() == alone.places.tolist()
    for bad in (torch.tensor([7]), torch.tensor([-1]), torch.tensor([0.5])):
        assert Request.of_all([ids[0], bad], [maps[0], maps[2]]) is None


def test_merged_sums_rows_of_equal_slots() -> None:
    slots, values = merged(
        [torch.tensor([1, 4]), torch.tensor([4, 2])],
        [torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])],
    )
    assert slots.tolist() == [1, 2, 4]
    assert values.tolist() == [[1.0], [20.0], [12.0]]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_merging_sums_rows_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    slots = torch.tensor([7, 2, 7, 0, 2, 7])
    values = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    merge = Merge.of(slots)
    assert merge.slots.tolist() == [0, 2, 7]
    wanted = torch.stack([values[slots == slot].sum(0) * 0.5 for slot in (0, 2, 7)])
    torch.testing.assert_close(merge.summed(values, 0.5), wanted)


def test_merging_nothing() -> None:
    merge = Merge.of(torch.empty(0, dtype=torch.int64))
    assert merge.summed(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (8,), (2, 8), (8, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
def test_rows_are_put_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> None:
    """Whether they can be taken for wide elements or not."""
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel()

    def any_bits(num_rows: int) -> torch.Tensor:
        """Also infinities and NaNs of all kinds."""
        num_bytes = (num_rows * size + offset) * dtype.itemsize
        raw = torch.randint(256, (num_bytes,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype)[offset:].reshape(num_rows, *shape)

    target, rows, places = any_bits(9), any_bits(3), torch.tensor([7, 0, 4])
    wanted = _bits(target).clone()
    for place, row in zip(places.tolist(), _bits(rows), strict=True):
        wanted[place] = row
    put_rows(target, places, rows)
    assert torch.equal(_bits(target), wanted)
    put_rows(target, places[:0], rows[:0])
    assert torch.equal(_bits(target), wanted)


def test_rows_are_put_into_every_second_column() -> None:
    target = torch.zeros(3, 8)
    put_rows(target[:, ::2], torch.tensor([1]), torch.ones(1, 4))
    assert target.tolist() == [[0.0] * 8, [1.0, 0.0] * 4, [0.0] * 8]


def test_a_single_row_may_lie_anyhow() -> None:
    rows = torch.arange(20.0).reshape(4, 5)[:1, :4]  # Contiguous for torch, whatever its stride.
    target = torch.zeros(2, 4)
    put_rows(target, torch.tensor([1]), rows)
    assert target.tolist() == [[0.0] * 4, [0.0, 1.0, 2.0, 3.0]]


def test_rows_of_another_dtype_are_refused() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        put_rows(torch.zeros(2, 4), torch.tensor([1]), torch.ones(1, 4, dtype=torch.int32))


def _bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(len(rows), -1).view(torch.uint8)


def test_regrouping_sorts_blocks_by_column() -> None:
    sizes = torch.tensor([[2, 0, 1], [1, 3, 0]])
    blocks = torch.tensor([0, 0, 2, 10, 11, 11, 11])  # ten times the line, plus the column
    places = regrouped(sizes)
    assert torch.empty(7, dtype=torch.int64).index_copy_(0, places, blocks).tolist() == [
        *(0, 0, 10),
        *(11, 11, 11),
        2,
    ]
    assert places[regrouped(sizes.t())].tolist() == list(range(7))
    assert regrouped(torch.zeros(2, 0, dtype=torch.int64)).tolist() == []
