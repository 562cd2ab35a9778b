"""A backward from its first gradient to its last: what is reduced, and with which weight.

[Note: nesting] A checkpoint with `use_reentrant=True` runs a backward of its own inside a node of
the outer one. A callback that is queued there is called when the inner one ends, in which the outer
node is still the current one. The nodes that follow it belong to the outer backward, so a hook on
them queues the callback anew. Gradients are reduced where no node is current: once, at the end of
the outermost backward. The callback's life tells whether a backward still runs: one that has raised
leaves none behind.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.dense import DenseRoute
from parallax.errors import ConfigError
from parallax.exchange.collective import Parcel, Push, announce_push, complete_push
from parallax.exchange.header import Operation, Verb
from parallax.exchange.neighbours import Neighbours
from parallax.exchange.peers import Peers
from parallax.sparse import TableRows

REDUCTION = "all gradients"
"""What a reduction is about."""


class Weight:
    """How much this worker's mean loss counts: n_i·N/Σn. See [Note: scale] in dense.py."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._from_data: float | None = None
        self._by_hand: float | None = None
        self._total: Tensor | None = None
        self._work: dist.Work | None = None

    def set_counts(self, counts: list[int]) -> None:
        """Every worker's number of samples in the batch that comes now."""
        self._by_hand = self._total = None
        self._from_data = self._scale(counts[self._peers.rank], sum(counts))
        self._peers.ledger.add_samples(counts[self._peers.rank])

    def forget_counts(self) -> None:
        """The loader has ended."""
        self._from_data = None

    def set_by_hand(self, count: float | Tensor) -> None:
        """This worker's count for the backwards until the next step or batch. Collective."""
        try:
            self._by_hand = float(count)
        except (TypeError, ValueError, RuntimeError):
            self._by_hand = math.nan
        if not 0 <= self._by_hand < math.inf:
            raise ConfigError(f"weight() takes this worker's count, a number ≥ 0, not {count!r}")
        self._total = torch.tensor([self._by_hand], dtype=torch.float64)
        self._work = self._peers.start_total(self._total, dist.ReduceOp.SUM)

    def end_step(self) -> None:
        self._by_hand = self._total = None

    def scale(self) -> float:
        """The factor for the gradients of this worker's next backward."""
        if self._by_hand is not None and self._total is not None:
            if self._work is not None:
                with self._peers.waiting(f"the workers' weights in step {self._peers.step}"):
                    self._peers.wait(self._work)
                self._work = None
            return self._scale(self._by_hand, float(self._total))
        return 1.0 if self._from_data is None else self._from_data

    def _scale(self, count: float, total: float) -> float:
        return count * self._peers.num_workers / total if total else 0.0


class Backward:
    """Joins both routes: begins with the first gradient of either, ends with the backward."""

    def __init__(
        self,
        peers: Peers,
        weight: Weight,
        names: list[str],
        buffers: Callable[[], list[Tensor]],
        device: torch.device,
    ) -> None:
        self.dense: DenseRoute
        self.tables: dict[str, TableRows] = {}
        self.neighbours: Neighbours
        self.num_partitions: Callable[[], int] = lambda: 1
        """In how many parts a push goes; the same on all workers."""
        self.observed: Callable[[set[str], set[str]], None] = lambda used, whole: None
        """Called when all workers' uses are known: names with a gradient, names used whole."""
        self.count = 0
        """Reductions so far."""
        self.buffers_changed = False
        self.call: Callable[[], bool] = lambda: False
        """Whether this worker calls all to a checkpoint after this step."""
        self.called = False
        """Whether any worker has; all learn it in the same reduction."""
        self.blind: Callable[[], list[bool]] = list
        """For each table: whether this worker cannot foresee its lookups."""
        self.settle: Callable[[list[bool]], None] = lambda blind: None
        """Called with the same of any worker."""
        self.before_reduction: Callable[[], None] = lambda: None
        """Called when the gradients of all workers begin to come together."""
        self._peers = peers
        self._weight = weight
        self._names = names
        self._buffers = buffers
        self._buffer_versions: list[tuple[int, int]] = []
        self._active = False
        self._task = -1
        """The call of autograd's engine that the last gradient came from."""
        self._ends: list[weakref.ref[partial[None]]] = []
        """Callbacks that engine calls of this backward hold; they die with their calls."""
        self._syncs = True
        self._scale = 1.0
        self._unsynced = False
        self._is_clocked = device.type == "cpu"
        self._began = 0.0

    def begin(self) -> float:
        """Called by either route for each gradient; says its scale."""
        if self._active and not any(end() for end in self._ends):
            self._abandon()
        if not self._active:
            self._active, self._task = True, -1
            self._ends.clear()
            self._scale = self._weight.scale()
            if self._syncs and self.dense.starts_early:
                self._arm()
            self._began = time.perf_counter()
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._queue_end()
        return self._scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside stay on this worker, for a later backward or step."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def catch_up(self, seen: int) -> None:
        """Before a step: reduce what no backward since reduction number `seen` has."""
        if self._active:
            self._abandon()
        if self._unsynced or self.count == seen:
            self._arm()
            self._reduce(0.0)

    def _arm(self) -> None:
        self.before_reduction()
        self.dense.arm()

    def _abandon(self) -> None:
        """An exception has ended the last backward. Its gradients go with the next one's."""
        self._active = False
        self._unsynced = True
        if self.dense.is_armed:
            # If it did not end on all workers, the next reduction's header shows it.
            self._peers.operation(Verb.REDUCTION, REDUCTION)
            self.dense.abandon()

    def _queue_end(self) -> None:
        """Have autograd call `_end` when the engine call that runs now has finished."""
        end = partial(self._end)
        self._ends.append(weakref.ref(end))
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end(self) -> None:
        """Called by autograd when an engine call of the backward has finished."""
        if not self._active:
            return
        node = torch._C._current_autograd_node()
        if node is not None:
            self.dense.nests()
            self._follow(node)
            return
        try:
            if self._syncs:
                if not self.dense.is_armed:
                    self._arm()
                self._reduce(time.perf_counter() - self._began if self._is_clocked else 0.0)
            else:
                self._unsynced = True
        finally:
            self._active = False

    def _follow(self, node: torch.autograd.graph.Node) -> None:
        """Notice the end of the backward in which `node` ran this one. See [Note: nesting]."""
        handles: list[Any] = []

        def resumed(_: object) -> None:
            for handle in handles:
                handle.remove()
            if self._active:
                self._queue_end()

        following = {id(each): each for each, _ in node.next_functions if each is not None}
        handles += [each.register_prehook(resumed) for each in following.values()]

    def _reduce(self, backward_seconds: float) -> None:
        """Bring every worker's gradients together. See [Note: arming] in dense.py.

        The push goes on beside the all-reduces, whose last ones `complete` has started.
        """
        had = [self._has_gradient(name) for name in self._names]
        whole = [name in self.tables and self.tables[name].used_whole for name in self._names]
        self.dense.complete()
        operation = self._peers.operation(Verb.REDUCTION, REDUCTION)
        parcels = [table.parcel() for table in self.tables.values()]
        parcels = self.neighbours.merge(operation, parcels)
        push, flags = announce_push(
            self._peers,
            operation,
            parcels,
            [*had, *whole, *self.blind(), self._buffers_touched(), self.call()],
        )
        used = {name for name, flag in zip(self._names, flags, strict=False) if flag}
        self.observed(used, set(itertools.compress(self._names, flags[len(self._names) :])))
        self.settle(flags[2 * len(self._names) : -2])
        self._push(operation, push, used)
        self.dense.wait()
        self.dense.forget([n for n, h in zip(self._names, had, strict=True) if not h | (n in used)])
        self.dense.reduce_strays(used, self._dense_rows(parcels, used))
        self.buffers_changed |= flags[-2]
        self.called |= flags[-1]
        self._unsynced = False
        self.count += 1
        self._peers.ledger.add_reduction(backward_seconds)

    def _push(self, operation: Operation, push: Push, used: set[str]) -> None:
        """Row gradients of the tables that are used go to their rows' owners."""
        tables = list(self.tables.values())
        for table in tables:
            table.touched = False
        chosen = [i for i, t in enumerate(tables) if t.name in used and not t.used_whole]
        for i in chosen:
            push.parcels[i] = tables[i].rounded(push.parcels[i])
        found = complete_push(self._peers, operation, push, chosen, self.num_partitions())
        self._count_nonfinite(found)
        for i, parcel in zip(chosen, found, strict=True):
            tables[i].receive(parcel)

    def _count_nonfinite(self, parcels: list[Parcel]) -> None:
        values = [parcel.values for parcel in parcels if parcel.values.numel()]
        # Sums tell in the usual case that there is nothing to count; one may also overflow.
        sums = [each.sum(dtype=torch.promote_types(each.dtype, torch.float32)) for each in values]
        if not sums or bool(torch.stack(sums).isfinite().all()):
            return
        for parcel in parcels:
            bad = (~parcel.values.isfinite()).reshape(len(parcel.values), -1).any(1)
            self._peers.ledger.add(parcel.name, nonfinite_rows=int(bad.sum()))

    def _dense_rows(self, parcels: list[Parcel], used: set[str]) -> dict[str, Tensor | None]:
        """Row gradients of tables that were used whole join their dense gradient."""
        return {
            name: table.dense_gradient(parcel)
            for (name, table), parcel in zip(self.tables.items(), parcels, strict=True)
            if name in used and table.used_whole and not table.retired
        }

    def _has_gradient(self, name: str) -> bool:
        table = self.tables.get(name)
        if table is not None and table.touched:
            return True
        parameter = self.dense.parameters.get(name)
        return parameter is not None and parameter.grad is not None

    def buffers_settled(self, buffers: list[Tensor]) -> None:
        """All workers have rank 0's buffers."""
        self.buffers_changed = False
        self._buffer_versions = _versions(buffers)

    def _buffers_touched(self) -> bool:
        versions = _versions(self._buffers())
        touched, self._buffer_versions = versions != self._buffer_versions, versions
        return touched


def _versions(buffers: list[Tensor]) -> list[tuple[int, int]]:
    return [(id(buffer), buffer._version) for buffer in buffers]
