"""The state of the random generators of this process."""

from __future__ import annotations

import random
import sys

import torch


def random_state() -> tuple[object, ...]:
    """Return the states of the generators that datasets use. Two results are equal if no random
    number was drawn between them."""
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state()[1:3] if numpy else (b"", 0)
    return (
        bytes(torch.get_rng_state().numpy()) if numpy else tuple(torch.get_rng_state().tolist()),
        random.getstate(),
        bytes(arrays[0]),
        arrays[1],
    )
