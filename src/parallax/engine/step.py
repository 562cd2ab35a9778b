"""A training step from the first batch to the update of the rows. See docs/how-it-works.md.

Its phases are methods, called in this order:

    prefetch   the loader hands a batch out; the rows of the next one are on their way
    lookup     the model looks rows up (also `embed`, which gathers them)
    reduce     at the end of a backward the gradients of all workers come together; autograd has
               brought those of lookups before (`deliver`)
    update     the optimizer steps on the rows that have a gradient (`begin_update` before it)
    settle     every optimizer has stepped: returns the next step
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from parallax.comm.cache import Cache
from parallax.comm.compression import packed, row_bytes, unpacked
from parallax.comm.header import NO_FAULT, Fault, Operation, Verb
from parallax.comm.pull import Asked
from parallax.comm.request import Request
from parallax.engine.backward import REDUCTION
from parallax.engine.batch import Batch
from parallax.engine.pending import PendingGradients
from parallax.engine.push import Push
from parallax.engine.sparse_table import Home, SparseTable
from parallax.errors import ParallaxError
from parallax.planning import cost
from parallax.tables.host import Counts
from parallax.tables.merge import any_in_row
from parallax.tables.space import Keys

if TYPE_CHECKING:
    from parallax.engine.engine import Engine

EARLY_UPDATE = "an update before the batch's backward"
"""What workers call it when they meet for it."""


class Step:
    """What is true for one step only; it ends when every optimizer has stepped."""

    def __init__(self, engine: Engine, pending: PendingGradients, unexpected: set[str]) -> None:
        """`pending` and `unexpected` are what the step before has not reduced or told yet."""
        self._engine = engine
        self._peers = engine.peers
        self._tables = engine.tables
        self._batch: Batch | None = None
        """Whose lookups need no message. See [Note: window] in prefetcher.py."""
        self._last_batch: Batch | None = None
        """The newest one; its rows are valid until they are updated."""
        self._caches: dict[str, Cache] = {}
        """By table: rows that were pulled since they last changed."""
        self._pending = pending
        self.touched = pending.touched
        """Tables that got a gradient since the last reduction, whatever its weight."""
        self._unexpected = unexpected
        """Tables with lookups or gradients that were not expected, on this worker."""
        self._not_prefetched: set[str] = set()
        """Tables that were looked up without prefetch since their update, on all workers."""

    # 1. Prefetch --------------------------------------------------------------------------

    def prefetch(self, of: tuple[int, int], batch: Any, following: tuple[Any, ...]) -> None:
        """The script gets a batch; `following` is the one after it, if it has been read."""
        found = self._engine.prefetcher.hand_out(
            of, batch, following, self._not_prefetched, self._engine.num_partitions
        )
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

    def embed(self, table: SparseTable, ids: Tensor, padding: int | None, wraps: bool) -> Tensor:
        """Return the row of each id, as `F.embedding` does."""
        number = self._match(table, ids)
        if number is not None:
            batch = self._batch
            assert batch is not None
            if padding is None or batch.padding_place(table.name, padding) is None:
                if number not in batch.gathered:
                    self._gather(batch, table, number)
                rows, shape = batch.gathered.pop(number), ids.shape
                return rows if len(shape) == 1 else rows.view(*shape, *rows.shape[1:])
            table.is_gathered = False  # From the next batch on.
        rows, places, at = self._distinct(table, ids, padding, wraps, number)
        if rows.dim() != 2:
            return rows[places]
        return torch.embedding(rows, places, -1 if at is None else at, False, False)

    def lookup(
        self, table: SparseTable, ids: Tensor, padding: int | None, wraps: bool
    ) -> tuple[Tensor, Tensor, int | None]:
        """Return distinct rows, the place of each id among them, and the padding row's place."""
        number = self._match(table, ids)
        if number is not None:
            table.is_gathered = False  # From the next batch on.
        return self._distinct(table, ids, padding, wraps, number)

    def _match(self, table: SparseTable, ids: Tensor) -> int | None:
        """Return the number of a prefetched lookup, if this is one."""
        if self._batch is None or not (torch.is_grad_enabled() and table.needs_gradient):
            return None
        return self._batch.match(table.name, ids)

    def _gather(self, batch: Batch, table: SparseTable, number: int) -> None:
        """Gather the rows of a lookup, and of all others that have not been looked up yet. See
        [Note: gather] in batch.py."""
        by_name, group_of = self._tables.by_name, batch.space.group_of
        positions = batch.space.positions
        numbers: list[list[int]] = [[] for _ in range(batch.space.num_groups)]
        if batch.is_gathered:
            numbers[group_of[positions[table.name]]].append(number)
        else:
            batch.is_gathered = table.is_gathered = True
            for other, (name, *_) in enumerate(batch.lookups):
                if by_name[name].is_gathered:
                    numbers[group_of[positions[name]]].append(other)
        rows = _Gather.apply(table.anchor, self._engine, batch, numbers)  # type: ignore[no-untyped-call]
        chosen = [each for group in numbers for each in group]
        batch.gathered.update(zip(chosen, rows, strict=True))

    def _distinct(
        self, table: SparseTable, ids: Tensor, padding: int | None, wraps: bool, number: int | None
    ) -> tuple[Tensor, Tensor, int | None]:
        if number is not None:
            batch = self._batch
            assert batch is not None
            places = batch.places_of(number).view(ids.shape)
            at = None if padding is None else batch.padding_place(table.name, padding)
            rows = _Delivery.apply(  # type: ignore[no-untyped-call]
                table.anchor, batch.rows_of(table.name)[1], self._engine, table, batch, None, at
            )
            return rows, places, at
        trains = torch.is_grad_enabled() and table.needs_gradient
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
            return self._prefetched_rows(table, request)
        self._engine.prefetcher.looked_up(name, ids)
        operation = self._peers.operation(Verb.LOOKUP, name)
        if table.group is None:
            return self._own_rows(table, operation, request)
        self.note_unexpected(name)
        cache = self._cache_of(name)
        missing = cache.missing(request.slots)
        rows = self._pulled(table, operation, request, missing)
        return cache.completed(request.slots, missing, rows, limit=table.row_map.largest)

    def _prefetched_rows(self, table: SparseTable, request: Request) -> Tensor:
        """Nobody else takes part: the others have their rows. See [Note: out-of-band pull]."""
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
            self._unexpected.add(name)
            operation = peers.operation(Verb.OUT_OF_BAND, name)
            places = table.row_map.places(missing)
            rows = peers.pull_out_of_band(operation, table.row_map.counts(missing), places)
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
                came = peers.exchange(
                    packed(rows, peers.row_format), asked.tolist(), counts[0].tolist()
                )
            rows = unpacked(came, shard, peers.row_format)
            _book_pull(
                self._engine, table.name, row_bytes(shard, peers.row_format), counts[0], asked
            )
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
        step_number: int,
    ) -> None:
        """Keep the gradient of a lookup's rows until the reduction. Called by autograd.

        `step_number` is that of the step in which the lookup was made. If it is over, nobody
        expects that the next update changes these rows.
        """
        if step_number != self._engine.num_steps:
            self._unexpected.add(table.name)
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
        self._pending.add(table.name, values, batch, slots)

    def deliver_gathered(
        self,
        batch: Batch,
        numbers: list[list[int]],
        step_number: int,
        gradients: tuple[Tensor | None, ...],
    ) -> None:
        """Keep the gradients of all gathered lookups of a batch. Called by autograd."""
        scale = self._engine.backward.begin()
        chosen = [number for group in numbers for number in group]
        found = {n: g for n, g in zip(chosen, gradients, strict=True) if g is not None}
        self.touched.update([batch.lookups[number][0] for number in found])
        is_stale = step_number != self._engine.num_steps
        if is_stale or batch is not self._last_batch or batch.space is not self._tables.space:
            for number, values in found.items():
                self._deliver_lookup(batch, number, step_number, values)
            return
        if (
            scale != 0
        ):  # Else a worker without samples: its loss may be NaN, and counts for nothing.
            self._pending.add_gathered(batch, numbers, found, scale)

    def _deliver_lookup(
        self, batch: Batch, number: int, step_number: int, gradient: Tensor
    ) -> None:
        """Keep the gradient of one gathered lookup by itself."""
        name = batch.lookups[number][0]
        table, slots = self._tables.by_name[name], batch.slots_of(name)
        row_shape = table.parameter.shape[1:]
        values = gradient.new_zeros((len(slots), *row_shape))
        values.index_add_(0, batch.places_of(number), gradient.reshape(-1, *row_shape))
        self.deliver(table, None, slots, values, None, step_number)

    def begin_backward(self) -> float:
        """A gradient has come; return the scale of this backward."""
        return self._engine.backward.begin()

    def deliver_dense(self, table: SparseTable, gradient: Tensor) -> None:
        """Take a gradient of all rows."""
        gradient = gradient.to_dense()
        ids = any_in_row(gradient != 0).nonzero().squeeze(1)
        slots, order = torch.sort(table.row_map.slots(ids))
        self._unexpected.add(table.name)  # Nobody has noted that these rows may change.
        self.deliver(table, None, slots, gradient[ids[order]], None, self._engine.num_steps)

    def drop_gradients(self, table: SparseTable) -> None:
        self._pending.drop(table.name)

    def rows_changed(self, table: SparseTable) -> None:
        """All rows have new values, on all workers."""
        self._forget_rows({table.name})
        self._engine.prefetcher.mark_changed({table.name})

    def note_unexpected(self, name: str) -> None:
        """Lookups were not prefetched, on all workers: owners do not know which rows may change."""
        self._not_prefetched.add(name)
        self._engine.prefetcher.mark_changed({name})

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
        cannot_prefetch = engine.prefetcher.cannot_prefetch(self._take_unexpected())
        engine.dense.complete()
        operation = peers.operation(Verb.REDUCTION, REDUCTION)
        push = Push(engine, operation, self._pending.collect(self._last_batch), self._asked)
        flags = push.announce(
            [
                *had,
                *whole,
                *cannot_prefetch,
                engine.buffers.are_touched(),
                engine.save_points.wants_save(),
            ]
        )
        used = {name for name, flag in zip(names, flags, strict=False) if flag}
        wholes = {name for name, flag in zip(names, flags[len(names) :], strict=False) if flag}
        new = engine.place_observed(used, wholes)
        self._close_window()
        for name in engine.prefetcher.settle(flags[2 * len(names) : -2]):
            self.note_unexpected(name)
        push.complete(used)
        if new:
            self._push_new(new)
        engine.dense.wait()
        engine.dense.forget([n for n, h in zip(names, had, strict=True) if not h | (n in used)])
        engine.dense.reduce_strays(used, self._rows_of_dense(used))
        self._pending.clear()
        engine.end_reduction(flags[-2], flags[-1])
        peers.ledger.add_reduction(backward_seconds)

    def _take_unexpected(self) -> set[str]:
        """Return the tables with unexpected lookups or gradients here, and forget them."""
        unexpected, self._unexpected = self._unexpected, set()
        if self._batch is not None:
            unexpected |= self._batch.open - self._batch.used
        return unexpected

    def _push_new(self, tables: list[SparseTable]) -> None:
        """Push gradients of tables that have become sharded in this reduction."""
        operation = self._peers.operation(Verb.REDUCTION, REDUCTION)
        names = {table.name for table in tables}
        gradients = self._pending.collect(None, names)
        push = Push(self._engine, operation, gradients, self._asked)
        push.announce(())
        push.complete(names)

    def _rows_of_dense(self, used: set[str]) -> dict[str, Tensor | None]:
        """Row gradients of tables that have become dense join their dense gradient."""
        found: dict[str, Tensor | None] = {}
        for name in self._engine.densified & used:
            table = self._tables.by_name[name]
            if table.home is Home.LEAVING:
                rows = self._pending.of_table(name)
                found[name] = None if rows is None else table.dense_gradient(*rows)
        return found

    @property
    def _asked(self) -> Asked | None:
        return None if self._last_batch is None else self._last_batch.asked

    # 5. Update ----------------------------------------------------------------------------

    def begin_update(self, optimizer: Optimizer) -> None:
        """Put stand-ins in the place of the tables that have a gradient.

        If the batch's backward is still to come, workers meet first: one of them may be pulling
        rows out of band for its lookups. See [Note: window] in prefetcher.py.
        """
        groups = self._tables.groups_of(optimizer)
        if self._batch is not None and any(group.graded for group in groups):
            self._peers.announce(self._peers.operation(Verb.MEETING, EARLY_UPDATE))
        self._engine.row_optimizers[id(optimizer)].swap_in(groups)

    def update(self, optimizer: Optimizer) -> None:
        """Take the rows over that an optimizer has stepped."""
        groups = self._tables.groups_of(optimizer)
        carried = {group.names[table] for group in groups for table in group.carried}
        names = self._engine.row_optimizers[id(optimizer)].swap_out()
        self._forget_rows(names)
        self._not_prefetched -= names
        if not carried.isdisjoint(names):
            # The gradient of an earlier step was used: it changes rows that nobody asked for.
            self._engine.prefetcher.mark_changed(carried & names)

    # 6. Settle ----------------------------------------------------------------------------

    def settle(self) -> Step:
        """Return the next step. Of this one, only what was not reduced goes on."""
        return Step(self._engine, self._pending, self._unexpected)

    def tables_changed(self) -> None:
        """Tables have become sharded or dense: lookups of this batch go on one by one."""
        self._batch = None


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
        ctx.padding_place, ctx.step_number = padding_place, engine.num_steps
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.engine.step.deliver(
            ctx.table, ctx.batch, ctx.slots, gradient, ctx.padding_place, ctx.step_number
        )
        return None, None, None, None, None, None, None


class _Gather(torch.autograd.Function):
    """The rows of all lookups of a batch; one call brings all their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, engine: Engine, batch: Batch, numbers: list[list[int]]
    ) -> tuple[Tensor, ...]:
        ctx.engine, ctx.batch, ctx.numbers = engine, batch, numbers
        ctx.step_number = engine.num_steps
        ctx.set_materialize_grads(False)
        return tuple(batch.gather(numbers))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.engine.step.deliver_gathered(ctx.batch, ctx.numbers, ctx.step_number, gradients)
        return None, None, None, None
