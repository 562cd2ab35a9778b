"""What a batch is: how many samples it has, and a part of them.

A batch is a tensor (or array), or a mapping, dataclass, tuple or list of such, nested at will.
A tuple or list is either *fields* (inputs and targets, each with a row for every sample) or
*samples* (one element for each). `count` has only the batch to go by: fields if all elements that
can be counted have the same count. `take` knows the number of samples, so that it errs less: see
`_holds_fields`. The loader counts the samples before they are collated wherever it can, so that
neither rule matters for the weight of a gradient there.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from parallax.errors import ConfigError

# Belongs to no sample in particular, hence to every part of the batch.
_SHARED = (str, bytes, int, float, complex, type(None))


def count(batch: Any) -> int:
    """The number of samples of `batch`.

    Tensor or array: its rows (one without dimensions is one sample). Mapping or dataclass: its
    first countable value. Tuple or list: the common count of its countable elements, else, or if
    there are none, its length. Anything else: one.
    """
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if _is_array(batch):
        return int(batch.shape[0]) if batch.shape else 1
    if (fields := _named_fields(batch)) is not None:
        return next((count(value) for value in fields.values() if _is_countable(value)), 1)
    if isinstance(batch, tuple | list):
        counts = _counts(batch)
        return counts.pop() if len(counts) == 1 else len(batch)
    return 1


def take(batch: Any, part: slice, num_samples: int) -> Any:
    """The samples `part` of a batch of `num_samples`, in the structure of the batch.

    Numbers, strings, None and tensors without dimensions go along unchanged.
    """

    def rows(array: Any) -> Any:
        if len(array) != num_samples:
            raise ConfigError(
                f"split=True cannot divide a batch of {num_samples} samples that holds a "
                f"{type(array).__name__} of shape {tuple(array.shape)}: its rows belong to no "
                "sample. Use split=False, or a collate_fn that gives each sample one row"
            )
        return array[part]

    return _map(batch, num_samples, part, rows)


def empty(batch: Any, num_samples: int) -> Any:
    """A batch of the structure of `batch`, which has `num_samples`, but without any sample.

    Tensors lose their rows even where those are not one a sample: the flat ids of an EmbeddingBag
    go with their offsets.
    """
    part = slice(0, 0)
    return _map(batch, num_samples, part, lambda array: array[part])


def _map(batch: Any, num_samples: int, part: slice, rows: Callable[[Any], Any]) -> Any:
    def down(value: Any) -> Any:
        return _map(value, num_samples, part, rows)

    if _is_array(batch):
        return rows(batch) if batch.shape else batch
    if isinstance(batch, _SHARED):
        return batch
    if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence):
        if not _holds_fields(batch, num_samples):
            return batch[part]
        return _like(batch, map(down, batch))
    if (fields := _named_fields(batch)) is not None:
        return _with_fields(batch, {name: down(value) for name, value in fields.items()})
    raise ConfigError(
        f"a batch holds a {type(batch).__name__}, of which no part can be taken for a worker with "
        "fewer samples than the others or none. Use drop_last=True, or a collate_fn that returns "
        "tensors, or mappings, dataclasses, tuples and lists of them"
    )


def _holds_fields(batch: tuple[Any, ...] | list[Any], num_samples: int) -> bool:
    """Whether the elements are fields with rows for all samples, not one sample each.

    Where some elements fit one reading and some the other (ragged tensors, one of which happens to
    be `num_samples` long; flat ids beside their offsets), a tuple is fields and a list is samples.
    """
    counts = _counts(batch)
    if hasattr(batch, "_fields") or len(batch) != num_samples or counts == {num_samples}:
        return True
    return num_samples in counts and isinstance(batch, tuple)


def _counts(elements: Iterable[Any]) -> set[int]:
    return {count(element) for element in elements if _is_countable(element)}


def _is_countable(value: Any) -> bool:
    if _is_array(value):
        return len(value.shape) > 0
    return isinstance(value, tuple | list) or _named_fields(value) is not None


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        hasattr(value, "shape") and hasattr(value, "__getitem__")
    )


def _named_fields(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _like(batch: tuple[Any, ...] | list[Any], elements: Iterable[Any]) -> Any:
    return type(batch)(*elements) if hasattr(batch, "_fields") else type(batch)(elements)


def _with_fields(batch: Any, fields: dict[Any, Any]) -> Any:
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return type(batch)(fields)  # type: ignore[call-arg]
    # A copy keeps what a constructor would want anew: a default factory, fields without init.
    clone = copy.copy(batch)
    if isinstance(clone, MutableMapping):
        clone.update(fields)
    else:
        for name, value in fields.items():
            object.__setattr__(clone, name, value)  # frozen dataclasses too
    return clone
