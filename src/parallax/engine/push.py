"""The row gradients of one reduction: from this worker's tables to the owners of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from parallax.comm.compression import RowFormat, row_bytes
from parallax.comm.header import Answer, Operation
from parallax.comm.pull import Asked, request_orders
from parallax.comm.push import Incoming, Outgoing, RowSums
from parallax.comm.rows import by_group
from parallax.engine.batch import Batch
from parallax.planning import cost
from parallax.tables.host import inverse, to_device, to_host
from parallax.tables.merge import any_in_row
from parallax.tables.space import Keys, SlotSpace, by_owner

if TYPE_CHECKING:
    from parallax.engine.engine import Engine


@dataclass(frozen=True)
class RowGradients:
    """This worker's gradients of rows, summed by row."""

    keys: Keys
    values: list[Tensor]
    """By group, in the order of keys."""
    batch: Batch | None = None
    """Whose rows these are, all of them: then the owners know which they are."""


class Push:
    """Row gradients of all tables on their way to the owners."""

    def __init__(
        self, engine: Engine, operation: Operation, gradients: RowGradients, asked: Asked | None
    ) -> None:
        """Sum them with those of the host's other workers, where a host pushes together. `asked`
        are the rows that workers asked for in the last pull."""
        self._engine, self._peers, self._operation = engine, engine.peers, operation
        self._asked = asked
        self._space: SlotSpace = engine.tables.space
        self._groups = engine.tables.groups
        self._tables = engine.tables.sharded
        if engine.host_merge.is_on:
            keys, values = engine.host_merge.merge(
                operation, self._space, gradients.keys, gradients.values
            )
            gradients = RowGradients(keys, values)
        self._gradients = gradients
        self._indices = torch.empty(0, dtype=torch.int32)

    def announce(self, flags: Sequence[bool]) -> list[bool]:
        """Tell the owners which rows have gradients; raise flags, and return those of all."""
        counts = None
        gradients = self._gradients
        if self._space.num_tables:
            counts = gradients.keys.counts.T
            known = None if gradients.batch is None else gradients.batch.indices
            self._indices = self._request_order() if known is None else known
        self._told: Answer = self._peers.announce(
            self._operation,
            counts,
            ids=self._indices,
            flags=flags,
            as_requested=gradients.batch is not None,
            is_met=True,
        )
        return self._told.flags

    def complete(self, used: set[str]) -> None:
        """Bring the gradients of the tables that are used to their rows' owners."""
        peers, space = self._peers, self._space
        if not space.num_tables or used.isdisjoint(space.names):
            return
        sent = space.group_sums(self._gradients.keys.counts)
        indices = by_group(self._indices, sent.T)
        if peers.num_workers == 1:
            self._receive(list(zip(indices, self._gradients.values, strict=True)), used, 0.0)
            return
        outgoing = [
            Outgoing(*each) for each in zip(self._values_to_send(), sent, indices, strict=True)
        ]
        with peers.waiting(self._operation):
            sums = RowSums(
                peers, outgoing, self._incoming(), self._gradients.values, peers.row_format
            )
        found = sums.wait(1 / peers.num_workers, lambda: peers.waiting(self._operation))
        self._receive(found, used, sums.waited_seconds)

    def _incoming(self) -> Incoming:
        """Return which rows come: those that workers asked for, or told now."""
        told, num_parts, asked = self._told, self._engine.num_partitions, self._asked
        if told.as_requested.all():
            assert asked is not None
            if asked.incoming.num_parts == num_parts:
                return asked.incoming
            indices = asked.indices
        elif told.as_requested.any():
            assert asked is not None
            indices = _mixed(told, asked)
        else:
            indices = told.ids.long()
        received = self._space.group_sums(told.counts.T)
        return Incoming(by_group(indices, received.T), received, num_parts)

    def _request_order(self) -> Tensor:
        """Return the indices of the rows, by owner."""
        keys, space = self._gradients.keys, self._space
        indices = space.indices(keys)
        order = by_owner(keys.counts, space.device)
        return indices if order is None else torch.empty_like(indices).scatter_(0, order, indices)

    def _values_to_send(self) -> list[Tensor]:
        """Return the gradients by group in request order, as they travel."""
        gradients = self._gradients
        values = gradients.values
        if self._peers.row_format is not RowFormat.FLOAT32:
            values = self._rounded(gradients)
        if gradients.batch is not None:
            orders = gradients.batch.orders
        else:
            orders = request_orders(self._space, gradients.keys.counts)
        return [
            rows if order is None else rows.index_select(0, inverse(order))
            for rows, order in zip(values, orders, strict=True)
        ]

    def _rounded(self, gradients: RowGradients) -> list[Tensor]:
        """Return the gradients by group in fewer bits, with what rounding took before."""
        starts, found, first = gradients.keys.starts.tolist(), [], 0
        for values, end in zip(gradients.values, self._space.group_ends.tolist(), strict=True):
            pieces = []
            for position in range(first, end):
                table = self._tables[position]
                low, high = starts[position : position + 2]
                piece = values[low - starts[first] : high - starts[first]]
                if table.rounds:
                    slots = gradients.keys.keys[low:high] - int(self._space.first_keys[position])
                    piece = table.rounded(slots, piece)
                pieces.append(piece)
            found.append(torch.cat(pieces))
            first = end
        return found

    def _receive(
        self, found: list[tuple[Tensor, Tensor]], used: set[str], waited_seconds: float
    ) -> None:
        """Give the sums to the groups, and note what was moved."""
        space, first_row, first = self._space, 0, 0
        for (indices, values), group, end in zip(
            found, self._groups, space.group_ends.tolist(), strict=True
        ):
            numbers = [i - first for i in range(first, end) if space.names[i] in used]
            if numbers:
                group.receive(numbers, indices - first_row if first_row else indices, values)
            first_row += len(group.rows)
            first = end
        if self._peers.num_workers > 1:
            self._book([indices for indices, _ in found], waited_seconds)
        self._count_nonfinite([values for _, values in found])

    def _book(self, indices: list[Tensor], seconds: float) -> None:
        peers, space, told = self._peers, self._space, self._told
        sent, received = self._gradients.keys.counts, told.counts.T
        away, here = sent.sum(1) - sent[:, peers.rank], received.sum(1) - received[:, peers.rank]
        sizes = space.by_table([row_bytes(v, peers.row_format) for v in self._gradients.values])
        with_ids = received * ~told.as_requested
        moved = (away + here) * sizes
        edges = to_device(space.offsets[:, peers.rank].copy(), space.device)
        joined = indices[0] if len(indices) == 1 else torch.cat(indices)
        starts = to_host(torch.searchsorted(joined, edges))
        peers.ledger.add_rows(
            space.names,
            sent_bytes=cost.push_bytes(away, sizes, 0 if told.as_requested[peers.rank] else away),
            received_bytes=cost.push_bytes(here, sizes, with_ids.sum(1) - with_ids[:, peers.rank]),
            seconds=seconds * moved / max(int(moved.sum()), 1),
            pushed_rows=sent.sum(1),
            updated_rows=np.diff(starts, append=len(joined)),
        )

    def _count_nonfinite(self, by_group: list[Tensor]) -> None:
        """Count rows with a NaN or an infinity. In the usual case one sum shows that there are
        none; it may also overflow."""
        for values in by_group:
            total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
            if not np.isfinite(to_host(total)):
                break
        else:
            return
        for table in self._tables:
            received = table.received
            if received is not None:
                bad = any_in_row(~received[1].isfinite())
                self._peers.ledger.add(table.name, nonfinite_rows=int(bad.sum()))


def _mixed(told: Answer, asked: Asked) -> Tensor:
    """Return the indices of all workers: some told them, the others asked for them before."""
    is_known = told.as_requested
    pulled = asked.indices.split_with_sizes(asked.counts.sum(1).tolist())
    named = told.ids.long().split_with_sizes((told.counts.sum(1) * ~is_known).tolist())
    parts = zip(is_known.tolist(), pulled, named, strict=True)
    return torch.cat([before if known else now for known, before, now in parts])
