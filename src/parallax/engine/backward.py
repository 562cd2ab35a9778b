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
from torch import Tensor, nn

from parallax.comm.header import Verb
from parallax.comm.peers import Peers
from parallax.engine.dense import Arming, DenseRoute
from parallax.engine.dense import Phase as Reduction
from parallax.engine.weight import Weight

REDUCTION = "all gradients"
"""What a reduction is about."""


class Phase(enum.Enum):
    """Where the gradients are."""

    REDUCED = "all that there are have been reduced"
    RUNNING = "a backward runs"
    UNSYNCED = "some were accumulated under no_sync(), or by a backward that raised"


class Trainer(Protocol):
    """The engine, which brings the gradients of all workers together."""

    peers: Peers
    dense: DenseRoute
    weight: Weight

    def begin_backward(self) -> None:
        """The first gradient of a backward has come."""

    def arm(self) -> None:
        """The gradients of all workers begin to come together."""

    def reduce(self, backward_seconds: float) -> None:
        """Bring them together."""


class Backward:
    """Sees where a backward begins and ends, and has it reduced."""

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self.phase = Phase.REDUCED
        self.num_reductions = 0
        self._trainer = trainer
        self._is_clocked = device.type == "cpu"
        self._syncs = True
        self._scale = 1.0
        self._began = 0.0
        self._task = -1
        """The call of autograd's engine that the last gradient came from."""
        self._ends: list[weakref.ref[partial[None]]] = []
        """Callbacks that engine calls of this backward hold; they die with their calls."""
        self._handles: dict[str, list[Any]] = {}
        """Hooks on dense parameters, by name."""

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Notice the gradients of a dense parameter, and scale them. See [Note: scale]."""
        dense, weight = self._trainer.dense, self._trainer.weight

        def scaled(gradient: Tensor) -> Tensor | None:
            scale = 1.0 if dense.phase is Reduction.COMPLETING else weight.scale()
            if scale == 1.0:
                return None
            # A worker without samples may have NaN here: its gradient is zero, not zero times it.
            return torch.zeros_like(gradient) if scale == 0.0 else gradient * scale

        def arrived(_: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # the reducer takes dense ones only
            if dense.phase is not Reduction.COMPLETING:
                self.begin()
                dense.arrived(name)

        # Frozen parameters have hooks too, for the day they are unfrozen.
        needs = parameter.requires_grad
        parameter.requires_grad_(True)
        self._handles[name] = [
            parameter.register_hook(scaled),
            parameter.register_post_accumulate_grad_hook(arrived),
        ]
        parameter.requires_grad_(needs)

    def unwatch(self, name: str) -> None:
        for handle in self._handles.pop(name):
            handle.remove()

    def close(self) -> None:
        for name in list(self._handles):
            self.unwatch(name)

    def begin(self) -> float:
        """A gradient has come, of either route. Return its scale."""
        task = torch._C._current_graph_task_id()
        if task == self._task and self.phase is Phase.RUNNING:
            return self._scale
        if self.phase is Phase.RUNNING and not any([end() for end in self._ends]):  # noqa: C419
            self._abandon()
        if self.phase is not Phase.RUNNING:
            self.phase = Phase.RUNNING
            self._ends.clear()
            self._trainer.begin_backward()
            self._scale = self._trainer.weight.scale()
            if self._syncs and self._trainer.dense.arming is Arming.AT_GRADIENT:
                self._trainer.arm()
            self._began = time.perf_counter()
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
            self._trainer.arm()
            self._reduce(0.0)

    def _reduce(self, backward_seconds: float) -> None:
        self._trainer.reduce(backward_seconds)
        self.phase = Phase.REDUCED
        self.num_reductions += 1

    def _abandon(self) -> None:
        """An exception has ended the last backward. Its gradients go with the next one's."""
        self.phase = Phase.UNSYNCED
        if self._trainer.dense.phase is not Reduction.IDLE:
            # If it did not end on all workers, the next reduction's header shows it.
            self._trainer.peers.operation(Verb.REDUCTION, REDUCTION)
            self._trainer.dense.abandon()

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
            self._trainer.dense.arming = Arming.AT_END
            self._follow(node)
            return
        self.phase = Phase.UNSYNCED
        if self._syncs:
            if self._trainer.dense.phase is Reduction.IDLE:
                self._trainer.arm()
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
