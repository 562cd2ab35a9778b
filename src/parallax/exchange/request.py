"""What a lookup asks for: the distinct rows among its ids, or what is wrong with them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax.exchange.header import Fault
from parallax.shard import Atlas, spread
from parallax.tables.rowmap import RowMap


@dataclass(frozen=True)
class Request:
    """The ids of a lookup, deduplicated. See [Note: slots] in tables/rowmap.py."""

    slots: Tensor
    """Distinct and sorted; none if there is a fault."""
    places: Tensor
    """Where each id's row is among them; has the shape of the ids."""
    fault: tuple[Fault, int] = (Fault.NONE, 0)

    @property
    def is_faulty(self) -> bool:
        return self.fault[0] is not Fault.NONE

    @staticmethod
    def of(ids: object, row_map: RowMap, *, wraps: bool, device: torch.device) -> Request:
        """With `wraps`, negative ids count from the end, as in `weight[ids]`."""
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32, torch.int16):
            return Request.failed((Fault.BAD_TYPE, 0), device)
        if not ids.numel():
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            return Request(nothing, nothing.reshape(ids.shape))
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if high >= row_map.num_rows or low < (-row_map.num_rows if wraps else 0):
            bad = high if high >= row_map.num_rows else low
            return Request.failed((Fault.BAD_ID, bad), device)
        ids = ids.long() % row_map.num_rows if low < 0 else ids.long()
        slots, places = torch.unique(row_map.slots(ids), return_inverse=True)
        return Request(slots, places)

    @staticmethod
    def of_all(ids: Sequence[Tensor], maps: Sequence[RowMap]) -> list[Request] | None:
        """Of several tables at once; None if something is wrong with some of them."""
        joined = torch.cat(list(ids))
        if joined.dtype not in (torch.int64, torch.int32, torch.int16):
            return None
        joined = joined.long()
        sizes, device = [each.size(0) for each in ids], joined.device
        atlas = Atlas.of(maps)
        num_rows = spread(atlas.num_rows, sizes, device)
        is_wrong = (joined < 0) | (joined >= num_rows)
        if bool(is_wrong.any()):
            return None
        slots = joined * spread(atlas.multipliers, sizes, device) % num_rows
        slots += spread(atlas.starts, sizes, device)
        keys, inverse = torch.unique(slots, return_inverse=True)
        edges = torch.searchsorted(keys, atlas.starts.to(device)).tolist()
        pieces = inverse.split_with_sizes(sizes)
        return [
            Request(keys[low:high] - begin, piece - low)
            for low, high, begin, piece in zip(
                edges, [*edges[1:], len(keys)], atlas.starts.tolist(), pieces, strict=True
            )
        ]

    @staticmethod
    def failed(fault: tuple[Fault, int], device: torch.device) -> Request:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return Request(nothing, nothing, fault)


@dataclass(frozen=True)
class Guess:
    """The ids that a table's only lookup of a batch will have, and what it then asks for."""

    ids: Tensor
    """Flat."""
    request: Request

    def answer(self, ids: object) -> Request | None:
        """What these ids ask for, if they are the ones."""
        if not isinstance(ids, Tensor) or ids.dtype is not self.ids.dtype:
            return None
        if ids.device != self.ids.device or not torch.equal(ids.reshape(-1), self.ids):
            return None
        return Request(self.request.slots, self.request.places.reshape(ids.shape))


class LastRequest:
    """Remembers one request: a weight and its bias are looked up with the same ids."""

    def __init__(self) -> None:
        self._ids: weakref.ref[Tensor] | None = None
        self._key: object = None
        self._request: Request | None = None

    def of(self, ids: Tensor, row_map: RowMap, *, wraps: bool, device: torch.device) -> Request:
        # Without a version counter a change of the ids in place would not be seen.
        if not isinstance(ids, Tensor) or ids.is_inference():
            return Request.of(ids, row_map, wraps=wraps, device=device)
        key = (ids._version, row_map, wraps, device)
        if self._request is None or self._ids is None or self._ids() is not ids or self._key != key:
            self._request = Request.of(ids, row_map, wraps=wraps, device=device)
            self._ids, self._key = weakref.ref(ids), key
        return self._request
