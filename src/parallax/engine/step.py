"""A training step from the first batch to the update of the rows. See docs/how-it-works.md.

Its phases are methods, called in this order:

    prefetch   the loader hands a batch out; the rows of the next one are on their way
    lookup     the model looks rows up (tables/table.py)
    deliver    autograd brings the gradient of a lookup
    reduce     the end of a backward: gradients of all workers come together
    update     the optimizer steps on the rows that have a gradient
    settle     the engine begins another step
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallax import cost
from parallax.comm.cache import Cache
from parallax.comm.header import NO_FAULT, Fault, Operation, Verb
from parallax.comm.push import RowSums, Traffic
from parallax.comm.request import Request
from parallax.comm.rows import by_group
from parallax.engine.backward import REDUCTION
from parallax.engine.batch import Batch
from parallax.engine.sparse_table import Home, SparseTable
from parallax.errors import ParallaxError
from parallax.tables.host import Counts, to_device, to_host
from parallax.tables.merge import any_in_row, merged
from parallax.tables.space import Keys, SlotSpace, by_owner
from parallax.wire import Wire, packed, row_bytes, unpacked

if TYPE_CHECKING:
    from parallax.engine.engine import Engine

_Gradient = tuple[Batch | None, Tensor | None, Tensor]
"""The gradient of a lookup's rows: they are those of a prefetched batch, or in these slots."""


class Step:
    """What is true for one step only; it ends when every optimizer has stepped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._peers = engine.peers
        self._tables = engine.tables
        self._batch: Batch | None = None
        """Whose lookups need no message. See [Note: window] in prefetcher.py."""
        self._last_batch: Batch | None = None
        """The newest one; its rows are valid until they are updated."""
        self._caches: dict[str, Cache] = {}
        """By table: rows that were pulled since they last changed."""
        self._gradients: dict[str, list[_Gradient]] = {}
        """By table: what has come here and was not reduced yet."""
        self.touched: set[str] = set()
        """Tables that got a gradient since the last reduction, of whatever weight."""
        self._surprised: set[str] = set()
        """Tables of which something was not as foreseen, here."""
        self._unforeseen: set[str] = set()
        """Tables that were looked up without prefetch since their update, on all workers."""

    # 1. Prefetch --------------------------------------------------------------------------

    def prefetch(self, of: tuple[int, int], batch: Any, following: tuple[Any, ...]) -> None:
        """The script gets a batch; `following` is the one after it, if it has been read."""
        found = self._engine.prefetcher.hand_out(of, batch, following, self._unforeseen)
        if found is None:
            return
        self._batch = self._last_batch = found
        for name in found.open & self._caches.keys():
            del self._caches[name]

    def end_data(self) -> None:
        """The loader has ended."""
        self._engine.prefetcher.end()
        self._close_window()

    def _close_window(self) -> None:
        """From now on lookups are collective again. Rows stay: they have not changed."""
        self._batch = None

    def _cache_of(self, name: str) -> Cache:
        cache = self._caches.get(name)
        if cache is None:
            cache = self._caches[name] = Cache()
            if self._last_batch is not None and name in self._last_batch.open:
                cache.put(*self._last_batch.rows_of(name))
        return cache

    # 2. Lookup ----------------------------------------------------------------------------

    def lookup(
        self, table: SparseTable, ids: Tensor, padding: int | None, wraps: bool
    ) -> tuple[Tensor, Tensor, int | None]:
        """Return distinct rows, the place of each id among them, and the padding row's place."""
        trains = torch.is_grad_enabled() and table.needs_gradient
        batch = self._batch
        if trains and batch is not None:
            found = batch.match(table.name, ids)
            if found is not None:
                position, places = found
                at = None if padding is None else batch.padding_place(table.name, padding)
                if at is None:
                    if batch.outputs is None:
                        batch.outputs = _Rows.apply(  # type: ignore[no-untyped-call]
                            table.anchor, self._engine, batch, self._tables.sharded
                        )
                    return batch.outputs[position], places, None
                rows = _Delivery.apply(  # type: ignore[no-untyped-call]
                    table.anchor, batch.rows[position], self._engine, table, batch, None, at
                )
                return rows, places, at
        request = self._engine.requests.of(
            ids, table.row_map, wraps=wraps, device=table.parameter.device
        )
        rows = self._fetched(table, request, ids) if trains else self._read(table, request)
        at = None if padding is None else _place_of(table.row_map.slot(padding), request.slots)
        if trains:
            rows = _Delivery.apply(  # type: ignore[no-untyped-call]
                table.anchor, rows, self._engine, table, None, request.slots, at
            )
        return rows, request.places, at

    def _fetched(self, table: SparseTable, request: Request, ids: object) -> Tensor:
        """Return the rows of a lookup that trains."""
        name = table.name
        if self._batch is not None and name in self._batch.open:
            return self._foreseen_rows(table, request)
        self._engine.prefetcher.looked_up(name, ids)
        operation = self._peers.operation(Verb.LOOKUP, name)
        if table.group is None:
            return self._own_rows(table, operation, request)
        self.surprise(name)
        cache = self._cache_of(name)
        missing = cache.missing(request.slots)
        rows = self._pulled(table, operation, request, missing)
        return cache.completed(request.slots, missing, rows, limit=table.row_map.largest)

    def _foreseen_rows(self, table: SparseTable, request: Request) -> Tensor:
        """Nobody else takes part: the others have their rows. See [Note: detour]."""
        assert self._batch is not None
        name, peers = table.name, self._peers
        self._batch.used.add(name)
        if request.is_faulty:
            self._raise_alone(table, request.fault)
        cache = self._cache_of(name)
        missing = cache.missing(request.slots)
        assert table.group is not None
        rows = table.group.rows[:0]
        if len(missing):
            self._surprised.add(name)
            operation = peers.operation(Verb.DETOUR, name)
            places = table.row_map.places(missing)
            rows = peers.detour(operation, table.row_map.counts(missing), places)
        # Without a limit: a later lookup of the batch has to find its rows as well.
        return cache.completed(request.slots, missing, rows, limit=table.row_map.num_rows)

    def _read(self, table: SparseTable, request: Request) -> Tensor:
        """Of an evaluation, which says nothing of what steps touch, or of a frozen table."""
        operation = self._peers.operation(Verb.LOOKUP_WITHOUT_GRADIENT, table.name)
        is_step = torch.is_grad_enabled()
        with nullcontext() if is_step else self._peers.ledger.aside():
            if table.group is None:
                return self._own_rows(table, operation, request)
            return self._pulled(table, operation, request, request.slots)

    def _own_rows(self, table: SparseTable, operation: Operation, request: Request) -> Tensor:
        _raise_faults(table, self._peers.announce(operation, fault=request.fault).faults)
        return table.values("lookup").index_select(0, table.row_map.ids(request.slots))

    def _pulled(
        self, table: SparseTable, operation: Operation, request: Request, missing: Tensor
    ) -> Tensor:
        """Return rows of one table, which all workers pull at the same time."""
        peers, shard = self._peers, table.shard
        assert shard is not None
        space = self._tables.space_of(table)
        union = self._engine.host_merge.union(operation, space, Keys(missing, space.count(missing)))
        counts = union.wanted.counts
        told = peers.announce(
            operation, counts.T, ids=space.indices(union.wanted), fault=request.fault, is_met=True
        )
        _raise_faults(table, told.faults)
        rows = shard.index_select(0, told.ids)
        if peers.num_workers > 1 and told.largest:  # Else nobody needs a row that it has not yet.
            asked = told.counts[:, 0]
            with peers.ledger.timed(table.name), peers.waiting(operation):
                came = peers.exchange(packed(rows, peers.wire), asked.tolist(), counts[0].tolist())
            rows = unpacked(came, shard, peers.wire)
            _book_pull(self._engine, table.name, row_bytes(shard, peers.wire), counts[0], asked)
        if union.is_merged:
            with peers.waiting(operation):
                (rows,) = union.deliver([rows])
        peers.ledger.add(table.name, rows=len(missing))
        return rows

    def _raise_alone(self, table: SparseTable, fault: tuple[Fault, int]) -> None:
        """Raise what is wrong with this worker's ids, and have the others raise it too."""
        faults = [NO_FAULT] * self._peers.num_workers
        faults[self._peers.rank] = fault
        try:
            _raise_faults(table, faults)
        except (IndexError, TypeError) as error:
            self._peers.report(error)
            raise

    # 3. Gradients -------------------------------------------------------------------------

    def deliver(
        self,
        table: SparseTable,
        batch: Batch | None,
        slots: Tensor | None,
        values: Tensor,
        padding_place: int | None,
        num_updates: int,
    ) -> None:
        """Keep the gradient of a lookup's rows until the reduction. Called by autograd.

        The lookup was made after so many updates; if there were more since, its rows are not among
        those that the next update was expected to change.
        """
        if num_updates != table.num_updates:
            self._surprised.add(table.name)
        if table.home is Home.DENSE:
            raise ParallaxError(
                f"backward through a lookup of {table.name!r} from before it was used whole in an "
                "earlier step: run the forward again"
            )
        scale = self._engine.backward.begin()
        self.touched.add(table.name)
        if scale == 0:  # a worker without samples: its loss may be NaN, and counts for nothing
            return
        if padding_place is not None:
            if slots is None:
                assert batch is not None
                slots, batch = batch.slots_of(table.name), None
            slots, values = _without(slots, padding_place), _without(values, padding_place)
        values = values if scale == 1 else values * scale
        self._gradients.setdefault(table.name, []).append((batch, slots, values))

    def deliver_batch(
        self,
        batch: Batch,
        tables: list[SparseTable],
        num_updates: list[int],
        gradients: tuple[Tensor | None, ...],
    ) -> None:
        """Keep the gradients of all rows of a batch: as `deliver`, by position of the table."""
        scale = self._engine.backward.begin()
        for table, number, values in zip(tables, num_updates, gradients, strict=True):
            if values is None:
                continue
            if number != table.num_updates or table.home is Home.DENSE:
                self.deliver(table, batch, None, values, None, number)
                continue
            self.touched.add(table.name)
            if scale == 0:
                continue
            if scale != 1:
                values = values * scale
            pieces = self._gradients.setdefault(table.name, [])
            pieces.append((batch, None, values))

    def begin_backward(self) -> float:
        """A gradient has come; return the scale of this backward."""
        return self._engine.backward.begin()

    def deliver_dense(self, table: SparseTable, gradient: Tensor) -> None:
        """Take a gradient of all rows."""
        gradient = gradient.to_dense()
        ids = any_in_row(gradient != 0).nonzero().squeeze(1)
        slots, order = torch.sort(table.row_map.slots(ids))
        self._surprised.add(table.name)  # Nobody has noted that these rows may change.
        self.deliver(table, None, slots, gradient[ids[order]], None, table.num_updates)

    def drop_gradients(self, table: SparseTable) -> None:
        self._gradients.pop(table.name, None)
        self.touched.discard(table.name)

    def rows_changed(self, table: SparseTable) -> None:
        """All rows have new values, on all workers."""
        self._forget_rows({table.name})
        self._engine.prefetcher.spoil({table.name})

    def surprise(self, name: str) -> None:
        """A lookup was not foreseen, on all workers: nobody has noted which rows may change."""
        self._unforeseen.add(name)
        self._engine.prefetcher.spoil({name})

    def densify(self, table: SparseTable, why: str, *, is_planned: bool) -> None:
        self._engine.densify(table, why, is_planned=is_planned)

    def _forget_rows(self, names: set[str]) -> None:
        for name in names & self._caches.keys():
            del self._caches[name]
        if self._last_batch is not None:
            self._last_batch.open -= names

    # 4. Reduce ----------------------------------------------------------------------------

    def reduce(self, backward_seconds: float) -> None:
        """Bring every worker's gradients together. See [Note: arming] in dense.py.

        The push overlaps with the all-reduces, whose last ones `complete` has started.
        """
        engine, peers = self._engine, self._peers
        names, parameters = engine.names, engine.dense.parameters
        had = [
            name in self.touched or ((p := parameters.get(name)) is not None and p.grad is not None)
            for name in names
        ]
        whole = [name in engine.densified for name in names]
        blind = engine.prefetcher.blind(self._take_surprises())
        engine.dense.complete()
        operation = peers.operation(Verb.REDUCTION, REDUCTION)
        push = _Push(self, operation)
        flags = push.announce(
            [*had, *whole, *blind, engine.buffers.are_touched(), engine.save_points.wants_save()]
        )
        used = {name for name, flag in zip(names, flags, strict=False) if flag}
        wholes = {name for name, flag in zip(names, flags[len(names) :], strict=False) if flag}
        new = engine.place_observed(used, wholes)
        self._close_window()
        for name in engine.prefetcher.settle(flags[2 * len(names) : -2]):
            self.surprise(name)
        push.complete(used)
        if new:
            self._push_new(new)
        engine.dense.wait()
        engine.dense.forget([n for n, h in zip(names, had, strict=True) if not h | (n in used)])
        engine.dense.reduce_strays(used, self._rows_of_dense(used))
        self._gradients.clear()
        self.touched.clear()
        engine.end_reduction(flags[-2], flags[-1])
        peers.ledger.add_reduction(backward_seconds)

    def _take_surprises(self) -> set[str]:
        """Return the tables of which something was not as foreseen here, and forget it."""
        surprised, self._surprised = self._surprised, set()
        if self._batch is not None:
            surprised |= self._batch.open - self._batch.used
        return surprised

    def _push_new(self, tables: list[SparseTable]) -> None:
        """Push gradients of tables that have become sharded in this reduction."""
        operation = self._peers.operation(Verb.REDUCTION, REDUCTION)
        push = _Push(self, operation, {table.name for table in tables})
        push.announce(())
        push.complete({table.name for table in tables})

    def _rows_of_dense(self, used: set[str]) -> dict[str, Tensor | None]:
        """Row gradients of tables that have become dense join their dense gradient."""
        found: dict[str, Tensor | None] = {}
        for name in self._engine.densified & used:
            table = self._tables.by_name[name]
            if table.home is Home.LEAVING:
                rows = self.gradient_of(name)
                found[name] = None if rows is None else table.dense_gradient(*rows)
        return found

    def gradient_of(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the gradients that have come here, summed by slot."""
        pieces = [
            (batch.slots_of(name) if slots is None and batch is not None else slots, values)
            for batch, slots, values in self._gradients.get(name, ())
        ]
        if not pieces:
            return None
        slots = [slots for slots, _ in pieces if slots is not None]
        values = [values for _, values in pieces]
        return merged(slots, values) if len(pieces) > 1 else (slots[0], values[0])

    def collect(self, space: SlotSpace, only: set[str] | None) -> tuple[Keys, list[Tensor]]:
        """Return what goes to the owners: keys, and gradients by group in their order."""
        batch = self._only_batch(space) if only is None else None
        values: list[list[Tensor]] = [[] for _ in self._tables.groups]
        group_of = np.repeat(
            np.arange(space.num_groups), np.diff(space.group_ends, prepend=0)
        ).tolist()
        keys: list[Tensor] = []
        for position, table in enumerate(self._tables.sharded):
            pieces = self._gradients.get(table.name)
            if not pieces or (only is not None and table.name not in only):
                continue
            if batch is not None:
                gradient = pieces[0][2]
                for _, _, more in pieces[1:]:
                    gradient = gradient + more
            else:
                found = self.gradient_of(table.name)
                assert found is not None
                slots, gradient = found
                keys.append(slots + int(space.first_keys[position]))
            values[group_of[position]].append(gradient)
        joined = [
            each[0] if len(each) == 1 else torch.cat([group.rows[:0], *each])
            for each, group in zip(values, self._tables.groups, strict=True)
        ]
        if batch is not None:
            return batch.request, joined
        nothing = torch.empty(0, dtype=torch.int64, device=space.device)
        found_keys = keys[0] if len(keys) == 1 else torch.cat([nothing, *keys])
        return Keys(found_keys, space.count(found_keys)), joined

    def _only_batch(self, space: SlotSpace) -> Batch | None:
        """Return the prefetched batch whose rows are exactly those that have a gradient now."""
        batch = self._batch
        if batch is None or batch.space is not space:
            return None
        sizes = batch.request.counts.sum(1).tolist()
        for name, size in zip(space.names, sizes, strict=True):
            pieces = self._gradients.get(name, ())
            if size and not pieces:
                return None
            for piece in pieces:
                if piece[0] is not batch:
                    return None
        return batch

    def known_indices(self, found: Keys) -> Tensor | None:
        """Return the indices of these keys by owner, if they are those of the prefetched batch."""
        batch = self._batch
        return batch.indices if batch is not None and batch.request is found else None

    # 5. Update ----------------------------------------------------------------------------

    def updated(self, names: set[str], reapplied: set[str]) -> None:
        """An optimizer has updated the rows of some tables. Of those that are `reapplied`, the
        gradient of an earlier step was used again, which changes rows that nobody has asked for."""
        for name in names:
            self._tables.by_name[name].num_updates += 1
        self._forget_rows(names)
        self._unforeseen -= names
        if reapplied:
            self._engine.prefetcher.spoil(reapplied)

    # 6. Settle ----------------------------------------------------------------------------

    def following(self) -> Step:
        """Return the next step. Of this one, only what was not reduced goes on."""
        step = Step(self._engine)
        step._gradients, step.touched = self._gradients, self.touched
        step._surprised = self._surprised
        return step

    def tables_changed(self) -> None:
        """Tables have become sharded or dense: lookups of this batch go on one by one."""
        self._batch = None


class _Push:
    """Row gradients of all tables on their way to the owners."""

    def __init__(self, step: Step, operation: Operation, only: set[str] | None = None) -> None:
        self._engine, self._operation = step._engine, operation
        self._space = step._tables.space
        self._groups = list(step._tables.groups)
        self._tables = list(step._tables.sharded)
        self._peers = step._peers
        found = Keys(torch.empty(0, dtype=torch.int64), np.zeros((0, 1), np.int64))
        values: list[Tensor] = []
        if self._space.num_tables:
            found, values = step.collect(self._space, only)
        self._found, self._values = self._engine.host_merge.merge(
            operation, self._space, found, values
        )
        self._indices = step.known_indices(self._found)

    def announce(self, flags: Any) -> list[bool]:
        """Tell the owners which rows have gradients; raise flags, and return those of all."""
        space, found = self._space, self._found
        counts, wire = None, None
        if space.num_tables:
            counts, wire = found.counts.T, self._indices
            if wire is None:
                wire = space.indices(found)
                order = by_owner(found.counts, space.device)
                if order is not None:
                    wire = torch.empty_like(wire).scatter_(0, order, wire)
        self._told = self._peers.announce(
            self._operation, counts, ids=wire, flags=flags, is_met=True
        )
        self._going = wire
        return self._told.flags

    def complete(self, used: set[str]) -> None:
        """Bring the gradients of the tables that are used to their rows' owners."""
        peers, space = self._peers, self._space
        if not space.num_tables or not used & set(space.names):
            return
        assert self._going is not None
        if peers.num_workers == 1:
            found = self._alone()
            waited = 0.0
        else:
            sent = space.group_sums(self._found.counts)
            received = space.group_sums(self._told.counts.T)
            traffic = [
                Traffic(*each)
                for each in zip(
                    self._in_wire_order(),
                    sent,
                    by_group(self._going, sent.T),
                    received,
                    by_group(self._told.ids.long(), received.T),
                    strict=True,
                )
            ]
            with peers.waiting(self._operation):
                sums = RowSums(
                    peers, traffic, self._values, peers.wire, self._engine.num_partitions
                )
            found = sums.wait(1 / peers.num_workers, lambda: peers.waiting(self._operation))
            waited = sums.waited_seconds
        self._receive(found, used, waited)

    def _alone(self) -> list[tuple[Tensor, Tensor]]:
        sent = self._space.group_sums(self._found.counts)
        assert self._going is not None
        return list(zip(by_group(self._going, sent.T), self._values, strict=True))

    def _in_wire_order(self) -> list[Tensor]:
        """Return the gradients by group, ordered by owner, as they travel."""
        found, first = [], 0
        for values, end in zip(self._rounded(), self._space.group_ends.tolist(), strict=True):
            order = by_owner(self._found.counts[first:end], self._space.device)
            if order is not None:
                source = torch.empty_like(order).scatter_(
                    0, order, torch.arange(len(order), device=order.device)
                )
                values = values.index_select(0, source)
            found.append(values)
            first = end
        return found

    def _rounded(self) -> list[Tensor]:
        """Return the gradients by group, in fewer bits if the session wants it."""
        if self._peers.wire is Wire.FLOAT32:
            return self._values
        starts, found, first = self._found.starts.tolist(), [], 0
        for values, end in zip(self._values, self._space.group_ends.tolist(), strict=True):
            pieces = []
            for position in range(first, end):
                table = self._tables[position]
                low, high = starts[position : position + 2]
                piece = values[low - starts[first] : high - starts[first]]
                if table.rounds:
                    key = self._found.keys[low:high] - int(self._space.first_keys[position])
                    piece = table.rounded(key, piece)
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
        peers, space = self._peers, self._space
        sent, received = self._found.counts, self._told.counts.T
        away, here = sent.sum(1) - sent[:, peers.rank], received.sum(1) - received[:, peers.rank]
        sizes = np.repeat(
            [row_bytes(values, peers.wire) for values in self._values],
            np.diff(space.group_ends, prepend=0),
        )
        moved = (away + here) * sizes
        edges = to_device(space.offsets[:, peers.rank].copy(), space.device)
        joined = indices[0] if len(indices) == 1 else torch.cat(indices)
        starts = to_host(torch.searchsorted(joined, edges))
        peers.ledger.add_rows(
            space.names,
            sent_bytes=cost.push_bytes(away, sizes),
            received_bytes=cost.push_bytes(here, sizes),
            seconds=seconds * moved / max(int(moved.sum()), 1),
            pushed_rows=sent.sum(1),
            updated_rows=np.diff(starts, append=len(joined)),
        )

    def _count_nonfinite(self, by_group: list[Tensor]) -> None:
        """Sums tell in the usual case that there is nothing to count; one may also overflow."""
        suspect = [
            values
            for values in by_group
            if not np.isfinite(
                to_host(values.sum(dtype=torch.promote_types(values.dtype, torch.float32)))
            )
        ]
        if not suspect:
            return
        for position, table in enumerate(self._tables):
            received = table.received
            if received is not None and position < self._space.num_tables:
                values = received[1]
                bad = any_in_row(~values.isfinite())
                self._peers.ledger.add(table.name, nonfinite_rows=int(bad.sum()))


def _book_pull(engine: Engine, name: str, size_bytes: int, counts: Counts, asked: Counts) -> None:
    rank = engine.peers.rank
    wanted = int(counts.sum() - counts[rank])
    served = int(asked.sum() - asked[rank])
    engine.peers.ledger.add(
        name,
        sent_bytes=cost.pull_bytes(wanted, served, size_bytes),
        received_bytes=cost.pull_bytes(served, wanted, size_bytes),
        asked_rows=int(counts.sum()),
    )


def _raise_faults(table: SparseTable, faults: list[tuple[Fault, int]]) -> None:
    """All workers raise what one of them found wrong with its ids."""
    for rank, (fault, value) in enumerate(faults):
        whose = f" on worker {rank}" if len(faults) > 1 else ""
        if fault is Fault.BAD_ID:
            raise IndexError(
                f"id {value}{whose} is out of range for table {table.name!r}, "
                f"which has {table.row_map.num_rows} rows"
            )
        if fault is Fault.BAD_TYPE:
            raise TypeError(
                f"the ids{whose} for table {table.name!r} must be a tensor of int64 or int32"
            )


def _place_of(slot: int, slots: Tensor) -> int | None:
    found = (slots == slot).nonzero()
    return int(found) if len(found) else None


def _without(rows: Tensor, place: int) -> Tensor:
    return torch.cat([rows[:place], rows[place + 1 :]])


class _Delivery(torch.autograd.Function):
    """Hands the gradient of pulled rows to the step. The anchor ties it into the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        rows: Tensor,
        engine: Engine,
        table: SparseTable,
        batch: Batch | None,
        slots: Tensor | None,
        padding_place: int | None,
    ) -> Tensor:
        ctx.engine, ctx.table, ctx.batch, ctx.slots = engine, table, batch, slots
        ctx.padding_place, ctx.num_updates = padding_place, table.num_updates
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.engine.step.deliver(
            ctx.table, ctx.batch, ctx.slots, gradient, ctx.padding_place, ctx.num_updates
        )
        return None, None, None, None, None, None, None


class _Rows(torch.autograd.Function):
    """The rows of all tables of a prefetched batch, as parts of one recorded graph: a single call
    brings the gradients of all of them."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, engine: Engine, batch: Batch, tables: list[SparseTable]
    ) -> tuple[Tensor, ...]:
        ctx.engine, ctx.batch, ctx.tables = engine, batch, tables
        ctx.num_updates = [table.num_updates for table in tables]
        ctx.set_materialize_grads(False)
        return tuple(batch.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.engine.step.deliver_batch(ctx.batch, ctx.tables, ctx.num_updates, gradients)
        return None, None, None, None
