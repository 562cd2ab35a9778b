"""The states of random generators: torch's, Python's, numpy's."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from parallax.checkpoint.plain import plain


def states() -> dict[str, Any]:
    """Those of this process."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")  # only if the script uses it
    if numpy is not None:
        found["numpy"] = plain(numpy.random.get_state(legacy=False), "numpy's random state")
    return found


def restore(saved: Sequence[dict[str, Any]], rank: int) -> None:
    """Give each worker its own sequence back; one that was not there begins a new one."""
    if rank < len(saved):
        _set(saved[rank])
    else:
        _seed(zlib.crc32(saved[0]["torch"].numpy()) + rank)


def _set(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"].clone())
    random.setstate(saved["python"])
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"].clone())
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in saved:
        numpy.random.set_state(saved["numpy"])


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
