"""Whether random numbers are drawn in this process."""

from __future__ import annotations

import random
import sys

import torch


def random_state() -> tuple[object, ...]:
    """Of the generators that datasets draw from; equal if nothing was drawn between."""
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state()[1:3] if numpy else (b"", 0)
    return (
        bytes(torch.get_rng_state().numpy()) if numpy else tuple(torch.get_rng_state().tolist()),
        random.getstate(),
        bytes(arrays[0]),
        arrays[1],
    )
