"""Values that `torch.load(weights_only=True)` reads again.

What it does not is found when saving, not when it is too late.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from parallax.errors import CheckpointError

_KINDS: tuple[type[Any], ...] = (bool, int, float, str, bytes)


def plain(value: Any, what: str) -> Any:
    """The value without subclasses: schedulers, say, leave numpy's floats in options."""
    if value is None or isinstance(value, torch.dtype | torch.device):
        return value
    for kind in _KINDS:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Tensor) and type(value.detach()) is Tensor:
        return value.detach()
    if isinstance(value, list | tuple):
        items = [plain(each, what) for each in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {plain(key, what): plain(each, what) for key, each in value.items()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, and a checkpoint holds only tensors, numbers, "
        "strings, and lists and dicts of them"
    )


def owned(value: Any) -> Any:
    """A copy in memory of a value that is mapped from a file."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)
