"""What a lookup asks for: the distinct rows among its ids, or what is wrong with them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax.comm.header import Fault
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
    def failed(fault: tuple[Fault, int], device: torch.device) -> Request:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return Request(nothing, nothing, fault)


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
