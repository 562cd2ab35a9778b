"""Copies of small tensors in host memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Counts = NDArray[np.int64]


def to_host(tensor: Tensor) -> Counts:
    """Return integers of a tensor as an array. On a GPU this waits for the device."""
    found: Counts = (tensor if tensor.is_cpu else tensor.cpu()).numpy()
    return found


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device)


def repeat(values: Tensor, counts: Counts) -> Tensor:
    """Repeat each value `counts` times; the size of the result is known, so no device is waited
    for."""
    repeats = to_device(counts, values.device)
    return torch.repeat_interleave(values, repeats, output_size=int(counts.sum()))


def starts_of(counts: Counts) -> Counts:
    """Return where each of several consecutive parts begins."""
    found: Counts = counts.cumsum() - counts
    return found


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
