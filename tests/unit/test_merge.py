"""Sums of equal rows, and rows copied to their places."""

from __future__ import annotations

import pytest
import torch

from parallax.tables.merge import Merge, merged, put_rows


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
    (merge,) = Merge.of(slots)
    assert merge.rows.tolist() == [0, 2, 7]
    wanted = torch.stack([values[slots == slot].sum(0) * 0.5 for slot in (0, 2, 7)])
    torch.testing.assert_close(merge.sum(values, 0.5), wanted)


def test_merging_nothing() -> None:
    (merge,) = Merge.of(torch.empty(0, dtype=torch.int64))
    assert merge.sum(torch.empty(0, 4)).shape == (0, 4)


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
