"""A backward from its first gradient to its last: what is reduced, and with which weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.dense import DenseRoute
from parallax.errors import ConfigError
from parallax.exchange.peers import Peers
from parallax.sparse import TableRows


class Weight:
    """How much this worker's mean loss counts: n_i·N/Σn. See [Note: scale] in dense.py."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._from_data: float | None = None
        self._by_hand: float | None = None
        self._total: Tensor | None = None
        self._work: dist.Work | None = None

    def set_counts(self, counts: list[int] | None) -> None:
        """Every worker's number of samples in the batch that comes now."""
        self._by_hand = self._total = None
        self._from_data = (
            None if counts is None else self._scale(counts[self._peers.rank], sum(counts))
        )

    def set_by_hand(self, count: float) -> None:
        """This worker's count for the backwards until the next step or batch. Collective."""
        if not isinstance(count, int | float) or not 0 <= count < math.inf:
            raise ConfigError(f"weight() takes this worker's count, a number ≥ 0, not {count!r}")
        self._by_hand = float(count)
        self._total = torch.tensor([count], dtype=torch.float64)
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
        self, peers: Peers, weight: Weight, names: list[str], buffers: list[Tensor]
    ) -> None:
        self.dense: DenseRoute
        self.tables: dict[str, TableRows] = {}
        self.observed: Callable[[set[str], set[str]], None] = lambda used, whole: None
        """Called when all workers' uses are known: names with a gradient, names used whole."""
        self.count = 0
        """Reductions so far."""
        self.buffers_changed = False
        self._peers = peers
        self._weight = weight
        self._names = names
        self._buffers = buffers
        self._buffer_versions = [buffer._version for buffer in buffers]
        self._active = False
        self._syncs = True
        self._scale = 1.0
        self._unsynced = False

    def begin(self) -> float:
        """Called by either route for each gradient; says its scale."""
        if not self._active:
            self._active = True
            self._scale = self._weight.scale()
            if self._syncs:
                self.dense.arm()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
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
        if self._active:  # an exception left the last backward in the middle
            self._active = False
            self._unsynced = True
        if self._unsynced or self.count == seen:
            self.dense.arm()
            self._reduce()

    def _end(self) -> None:
        """Called by autograd when the backward has run."""
        try:
            if self._syncs:
                self._reduce()
            else:
                self._unsynced = True
        finally:
            self._active = False

    def _reduce(self) -> None:
        """Bring every worker's gradients together. See [Note: arming] in dense.py."""
        had = [self._has_gradient(name) for name in self._names]
        whole = [name in self.tables and self.tables[name].used_whole for name in self._names]
        flags = torch.tensor([*had, *whole, self._buffers_touched()], dtype=torch.uint8)
        work = self._peers.start_total(flags, dist.ReduceOp.MAX)
        self.dense.complete()
        with self._peers.waiting(f"the end of backward in step {self._peers.step}"):
            self._peers.wait(work)
        self._apply(had, flags.tolist())
        self._unsynced = False
        self.count += 1

    def _apply(self, had: list[bool], bits: list[int]) -> None:
        """Do with every worker's flags what they ask for."""
        num_names = len(self._names)
        used = {name for name, bit in zip(self._names, bits[:num_names], strict=True) if bit}
        whole = {name for name, bit in zip(self._names, bits[num_names:-1], strict=True) if bit}
        self.buffers_changed |= bool(bits[-1])
        nowhere = [n for n, h in zip(self._names, had, strict=True) if not h and n not in used]
        self.dense.forget(nowhere)
        self.observed(used, whole)
        self._hand_over(used)

    def _hand_over(self, used: set[str]) -> None:
        """Row gradients go to the push, or join the dense gradient of a table used whole."""
        extra = {}
        for name, table in self.tables.items():
            table.touched = False
            if name not in used or table.retired:
                continue
            if table.used_whole:
                extra[name] = table.dense_gradient()
            else:
                table.has_gradient = table.unpushed = True
        self.dense.reduce_strays(used, extra)

    def _has_gradient(self, name: str) -> bool:
        table = self.tables.get(name)
        if table is not None and table.touched:
            return True
        parameter = self.dense.parameters.get(name)
        return parameter is not None and parameter.grad is not None

    def buffers_settled(self) -> None:
        """All workers have rank 0's buffers."""
        self.buffers_changed = False
        self._buffer_versions = [buffer._version for buffer in self._buffers]

    def _buffers_touched(self) -> bool:
        versions = [buffer._version for buffer in self._buffers]
        touched, self._buffer_versions = versions != self._buffer_versions, versions
        return touched
