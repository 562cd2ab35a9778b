"""Compression of rows: rows travel in full precision, or rounded to fewer bits.

[Note: compression] Rows that are pulled in fewer bits are rounded in the same way for all workers,
also for their owner, while the owner updates the exact rows. The worker that pushes a rounded
gradient stores the rounding error and adds it to the next gradient of the row, so that errors do
not add up. See error_feedback.py.
"""

from __future__ import annotations

import enum

import torch
from torch import Size, Tensor


class RowFormat(str, enum.Enum):
    """How rows of 32-bit floats travel; rows of other types are not compressed."""

    FLOAT32 = "float32"
    """Not compressed."""
    BF16 = "bf16"
    """Half of the bytes: 8 bits of mantissa."""
    INT8 = "int8"
    """A quarter of the bytes: integers, and for each row a scale (its largest number ÷ 127)."""


_SCALE_BYTES = 4
_MIN_INT8_WIDTH = 8
"""Narrower rows would save hardly any bytes."""


def packed(rows: Tensor, row_format: RowFormat) -> Tensor:
    """Return the rows as they are sent."""
    if not is_packed(rows, row_format):
        return rows
    if row_format is RowFormat.BF16:
        return rows.to(torch.bfloat16)
    flat = rows.flatten(1)
    scales = flat.abs().amax(1, keepdim=True) / 127
    # A row of zeros may have any scale. A row with an infinity or NaN is received as NaN.
    scales = scales.masked_fill(scales == 0, 1.0)
    levels = (flat / scales).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    return torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], 1)


def rounded(rows: Tensor, row_format: RowFormat) -> Tensor:
    """Return the rows as they are received: compressed and decompressed."""
    return unpacked(packed(rows, row_format), rows, row_format)


def unpacked(values: Tensor, like: Tensor, row_format: RowFormat) -> Tensor:
    """Return rows of the dtype and shape of `like` from received values."""
    if not is_packed(like, row_format):
        return values
    if row_format is RowFormat.BF16:
        return values.to(like.dtype)
    # A copy, for alignment: a slice of one row counts as contiguous at any byte.
    scales = values[:, -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(like.dtype)
    levels = values[:, :-_SCALE_BYTES].view(torch.int8)
    return (levels * scales).reshape(len(values), *like.shape[1:])


def is_packed(rows: Tensor, row_format: RowFormat) -> bool:
    """Return whether rows of this dtype and width are compressed."""
    if row_format is RowFormat.FLOAT32 or rows.dtype is not torch.float32:
        return False
    return row_format is RowFormat.BF16 or rows.shape[1:].numel() >= _MIN_INT8_WIDTH


def row_bytes(rows: Tensor, row_format: RowFormat) -> int:
    """Return the bytes of one row as it is sent."""
    width = Size(rows.shape[1:]).numel()
    if not is_packed(rows, row_format):
        return width * rows.element_size()
    return 2 * width if row_format is RowFormat.BF16 else width + _SCALE_BYTES
