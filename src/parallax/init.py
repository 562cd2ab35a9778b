"""Start values of tables too large for one worker: each row's depend on its id alone.

A table built on the `meta` device is initialised shard by shard. Its values come from a hash of
(seed, row, column), not from a generator's sequence, so that they are the same at any number of
workers and on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallax.config import Initializer

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed 64-bit integer
_MIX = (-4658895280553007687, -7723592293110705685)  # splitmix64's multipliers, signed


def normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normal start values."""

    def fill(ids: Tensor, row_shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
        uniform_values = _uniform(ids, row_shape, seed).mul_(2).sub_(1)
        return uniform_values.erfinv_().mul_(std * math.sqrt(2)).add_(mean).to(dtype)

    return fill


def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Uniform start values in [low, high)."""

    def fill(ids: Tensor, row_shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
        return _uniform(ids, row_shape, seed).mul_(high - low).add_(low).to(dtype)

    return fill


def constant(value: float) -> Initializer:
    """The same value everywhere."""

    def fill(ids: Tensor, row_shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
        return torch.full((len(ids), *row_shape), value, dtype=dtype, device=ids.device)

    return fill


def _uniform(ids: Tensor, row_shape: torch.Size, seed: int) -> Tensor:
    """Doubles strictly between 0 and 1, one for each element of the rows `ids`."""
    columns = torch.arange(row_shape.numel(), device=ids.device)
    row_keys = _mixed(ids.to(torch.int64).mul(_GOLDEN).add_(seed))
    bits = _mixed(row_keys[:, None] + columns.mul(_GOLDEN)[None, :])
    # The middle of each of 2**52 steps: never 0 or 1, where the normal's inverse is infinite.
    fractions = (bits & (2**52 - 1)).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return fractions.reshape(len(ids), *row_shape)


def _mixed(keys: Tensor) -> Tensor:
    """splitmix64's finaliser on signed integers, whose products wrap as unsigned ones do."""
    keys = (keys ^ _shifted(keys, 30)) * _MIX[0]
    keys = (keys ^ _shifted(keys, 27)) * _MIX[1]
    return keys ^ _shifted(keys, 31)


def _shifted(keys: Tensor, places: int) -> Tensor:
    """A logical right shift: the sign bit does not spread."""
    return (keys >> places) & ((1 << (64 - places)) - 1)
