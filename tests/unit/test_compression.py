"""Rows in fewer bits: how many, how far off, and what becomes of odd ones."""

from __future__ import annotations

import pytest
import torch

from parallax.comm.compression import RowFormat, is_packed, packed, rounded, row_bytes, unpacked


@pytest.mark.parametrize("row_format", RowFormat)
@pytest.mark.parametrize("shape", [(0, 16), (5, 16), (5, 4, 8), (3, 257), (0, 10), (1, 10)])
def test_rows_keep_shape_and_dtype_and_take_the_bytes_told(
    shape: tuple[int, ...], row_format: RowFormat
) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    there = packed(rows, row_format)
    assert there.nbytes == len(rows) * row_bytes(rows, row_format)
    back = unpacked(there, rows, row_format)
    assert back.shape == rows.shape
    assert back.dtype == rows.dtype


def test_how_far_off() -> None:
    rows = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)) * 10
    assert torch.equal(rounded(rows, RowFormat.FLOAT32), rows)
    assert ((rounded(rows, RowFormat.BF16) - rows).abs() <= rows.abs() / 256).all()
    steps = rows.abs().amax(1, keepdim=True) / 127
    assert ((rounded(rows, RowFormat.INT8) - rows).abs() <= steps * 0.5001).all()


def test_int8_rounds_each_row_by_itself() -> None:
    rows = torch.ones(2, 16)
    rows[1] *= 1e-6
    torch.testing.assert_close(rounded(rows, RowFormat.INT8), rows)


@pytest.mark.parametrize("row_format", RowFormat)
def test_zeros_stay_and_what_is_not_finite_is_seen(row_format: RowFormat) -> None:
    rows = torch.ones(4, 16)
    rows[0] = 0
    rows[1, 3] = float("nan")
    rows[2, 3] = float("inf")
    back = rounded(rows, row_format)
    assert torch.equal(back[0], rows[0])
    assert not back[1].isfinite().all()
    assert not back[2].isfinite().all()
    torch.testing.assert_close(back[3], rows[3])


def test_others_travel_as_they_are() -> None:
    for rows in (torch.randn(3, 16, dtype=torch.float64), torch.randn(3, 16).bfloat16()):
        assert not is_packed(rows, RowFormat.INT8)
        assert torch.equal(rounded(rows, RowFormat.INT8), rows)
    narrow = torch.randn(3, 2)
    assert not is_packed(narrow, RowFormat.INT8)
    assert is_packed(narrow, RowFormat.BF16)


def test_the_bytes_of_a_wide_row() -> None:
    rows = torch.empty(1, 512)
    exact = row_bytes(rows, RowFormat.FLOAT32) + 4
    assert (row_bytes(rows, RowFormat.BF16) + 4) / exact < 0.51
    assert (row_bytes(rows, RowFormat.INT8) + 4) / exact < 0.27
