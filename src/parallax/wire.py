"""Rows as they travel: as they are, or in fewer bits.

[Note: wire] Rows that are pulled in fewer bits are rounded alike for all workers, their own ones
too, while their owners update the exact ones. What rounding takes from a pushed gradient is kept by
the worker that pushed it, and added to the row's next gradient: errors do not add up.
"""

from __future__ import annotations

import enum

import torch
from torch import Size, Tensor


class Wire(str, enum.Enum):
    """How a row of 32-bit numbers travels; others travel as they are."""

    FLOAT32 = "float32"
    """As it is."""
    BF16 = "bf16"
    """Eight bits of mantissa, half of the bytes."""
    INT8 = "int8"
    """A step of the row's largest number ÷ 127 each, and that step: a quarter of the bytes."""


_SCALE_BYTES = 4
_MIN_INT8_WIDTH = 8
"""Narrower rows would hardly gain."""


def packed(rows: Tensor, wire: Wire) -> Tensor:
    """What travels."""
    if not is_packed(rows, wire):
        return rows
    if wire is Wire.BF16:
        return rows.to(torch.bfloat16)
    flat = rows.flatten(1)
    steps = flat.abs().amax(1, keepdim=True) / 127
    # A row of zeros has any step; one with an infinity or NaN comes out as NaN.
    steps = steps.masked_fill(steps == 0, 1.0)
    levels = (flat / steps).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    return torch.cat([levels.view(torch.uint8), steps.view(torch.uint8)], 1)


def rounded(rows: Tensor, wire: Wire) -> Tensor:
    """As they are after their way."""
    return unpacked(packed(rows, wire), rows, wire)


def unpacked(values: Tensor, like: Tensor, wire: Wire) -> Tensor:
    """Rows of `like`'s kind, out of what has come."""
    if not is_packed(like, wire):
        return values
    if wire is Wire.BF16:
        return values.to(like.dtype)
    # A copy: a tensor of one row counts as contiguous where it lies, at whatever byte.
    steps = values[:, -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(like.dtype)
    levels = values[:, :-_SCALE_BYTES].view(torch.int8)
    return (levels * steps).reshape(len(values), *like.shape[1:])


def is_packed(rows: Tensor, wire: Wire) -> bool:
    """Whether rows of this kind travel in fewer bits."""
    if wire is Wire.FLOAT32 or rows.dtype is not torch.float32:
        return False
    return wire is Wire.BF16 or rows.shape[1:].numel() >= _MIN_INT8_WIDTH


def row_bytes(rows: Tensor, wire: Wire) -> int:
    """Of a row as it travels."""
    width = Size(rows.shape[1:]).numel()
    if not is_packed(rows, wire):
        return width * rows.element_size()
    return 2 * width if wire is Wire.BF16 else width + _SCALE_BYTES
