"""A backward from its first gradient to its last.

[Note: nesting] A checkpoint with `use_reentrant=True` runs a backward of its own inside a node of
the outer one. A callback that is queued there is called when the inner one ends, in which the outer
node is still the current one. The nodes that follow it belong to the outer backward, so a hook on
them queues the callback anew. Gradients are reduced where no node is current: once, at the end of
the outermost backward. The callback's life tells whether a backward still runs: one that has raised
leaves none behind.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from parallax.comm.header import Verb
from parallax.comm.peers import Peers
from parallax.engine.dense import DenseRoute
from parallax.engine.weight import Weight

REDUCTION = "all gradients"
"""What a reduction is about."""


class Phase(enum.Enum):
    """Where the gradients are."""

    REDUCED = "all that there are have been reduced"
    RUNNING = "a backward runs"
    UNSYNCED = "some were accumulated under no_sync(), or by a backward that raised"


class Reducer(Protocol):
    """Who brings the gradients of all workers together."""

    peers: Peers
    dense: DenseRoute
    weight: Weight

    def arm(self) -> None:
        """The gradients of all workers begin to come together."""

    def reduce(self, backward_seconds: float) -> None:
        """Bring them together."""


class Backward:
    """Sees where a backward begins and ends, and has it reduced."""

    def __init__(self, reducer: Reducer, device: torch.device) -> None:
        self.phase = Phase.REDUCED
        self.num_reductions = 0
        self._reducer = reducer
        self._is_clocked = device.type == "cpu"
        self._syncs = True
        self._scale = 1.0
        self._began = 0.0
        self._task = -1
        """The call of autograd's engine that the last gradient came from."""
        self._ends: list[weakref.ref[partial[None]]] = []
        """Callbacks that engine calls of this backward hold; they die with their calls."""

    def begin(self) -> float:
        """A gradient has come, of either route. Return its scale."""
        if self.phase is Phase.RUNNING and not any(end() for end in self._ends):
            self._abandon()
        if self.phase is not Phase.RUNNING:
            self.phase, self._task = Phase.RUNNING, -1
            self._ends.clear()
            self._scale = self._reducer.weight.scale()
            if self._syncs and self._reducer.dense.starts_early:
                self._reducer.arm()
            self._began = time.perf_counter()
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._queue_end()
        return self._scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside stay on this worker, for a later backward or update."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def catch_up(self, seen: int) -> None:
        """Before an update: reduce what no backward since reduction number `seen` has."""
        if self.phase is Phase.RUNNING:
            self._abandon()
        if self.phase is Phase.UNSYNCED or self.num_reductions == seen:
            self._reducer.arm()
            self._reduce(0.0)

    def _reduce(self, backward_seconds: float) -> None:
        self._reducer.reduce(backward_seconds)
        self.phase = Phase.REDUCED
        self.num_reductions += 1

    def _abandon(self) -> None:
        """An exception has ended the last backward. Its gradients go with the next one's."""
        self.phase = Phase.UNSYNCED
        if self._reducer.dense.is_armed:
            # If it did not end on all workers, the next reduction's header shows it.
            self._reducer.peers.operation(Verb.REDUCTION, REDUCTION)
            self._reducer.dense.abandon()

    def _queue_end(self) -> None:
        """Have autograd call `_end` when the engine call that runs now has finished."""
        end = partial(self._end)
        self._ends.append(weakref.ref(end))
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end(self) -> None:
        """Called by autograd when an engine call of the backward has finished."""
        if self.phase is not Phase.RUNNING:
            return
        node = torch._C._current_autograd_node()
        if node is not None:
            self._reducer.dense.nests()
            self._follow(node)
            return
        self.phase = Phase.UNSYNCED
        if self._syncs:
            if not self._reducer.dense.is_armed:
                self._reducer.arm()
            self._reduce(time.perf_counter() - self._began if self._is_clocked else 0.0)

    def _follow(self, node: torch.autograd.graph.Node) -> None:
        """Notice the end of the backward in which `node` ran this one. See [Note: nesting]."""
        handles: list[Any] = []

        def resumed(_: object) -> None:
            for handle in handles:
                handle.remove()
            if self.phase is Phase.RUNNING:
                self._queue_end()

        following = {id(each): each for each, _ in node.next_functions if each is not None}
        handles += [each.register_prehook(resumed) for each in following.values()]
