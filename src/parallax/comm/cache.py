"""Rows that this worker has pulled since they last changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Cache:
    """Rows pulled in this step: a second lookup in it pulls only what is new."""

    segments: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def put(self, slots: Tensor, rows: Tensor) -> None:
        self.segments = [(slots, rows)]

    def missing(self, slots: Tensor) -> Tensor:
        for known, _ in self.segments:
            slots = slots[~_member_of(slots, known)]
        return slots

    def completed(self, slots: Tensor, missing: Tensor, rows: Tensor, limit: int) -> Tensor:
        """All rows of `slots`, of which those of `missing` have just come."""
        if len(self.segments) == 1 and len(self.segments[0][0]) == len(slots) and not len(missing):
            return self.segments[0][1]  # the very same rows
        segments = [*self.segments, (missing, rows)]
        self.segments = _compact(segments, limit)
        if len(segments) == 1:
            return rows
        result = rows.new_empty((len(slots), *rows.shape[1:]))
        for known, values in segments:
            here = _member_of(slots, known)
            result[here] = values[torch.searchsorted(known, slots[here])]
        return result


def _compact(segments: list[tuple[Tensor, Tensor]], limit: int) -> list[tuple[Tensor, Tensor]]:
    """Few segments, and never more rows than a shard has: a lookup then pulls again."""
    segments = [segment for segment in segments if len(segment[0])]
    if sum(len(slots) for slots, _ in segments) > max(limit, 1):
        return []
    if len(segments) <= 8:
        return segments
    slots, order = torch.sort(torch.cat([slots for slots, _ in segments]))
    return [(slots, torch.cat([rows for _, rows in segments])[order])]


def _member_of(slots: Tensor, known: Tensor) -> Tensor:
    if not len(known):
        return torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
    at = torch.searchsorted(known, slots).clamp_(max=len(known) - 1)
    return known[at] == slots
