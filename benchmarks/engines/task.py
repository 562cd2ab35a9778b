"""What an engine is asked to do, and the step that all torch engines share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.workloads import Workload, by_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchmarks.workloads.model import Model

Trainer = Callable[[int], float]
"""Takes so many steps and returns the last one's loss."""
PATIENCE_SECONDS = 3600.0
"""How long workers wait for each other. The clock runs on while others have their turns."""


@dataclass
class Task:
    """A workload, this worker's place among the others, and the engine's options."""

    workload: Workload
    rank: int
    num_workers: int
    is_emulated: bool
    options: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time of a turn went, by the names given to `span`."""

    @classmethod
    def from_environment(cls, workload: str, *, is_emulated: bool, options: dict[str, Any]) -> Task:
        rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(by_name(workload), rank, num_workers, is_emulated, options)

    def layers(self) -> nn.Module:
        from benchmarks.workloads.model import make_layers

        return make_layers(self.workload, emulated=self.is_emulated)

    def model(self, *, sparse: bool, device: str = "cpu") -> Model:
        """`device` is that of the tables."""
        from benchmarks.workloads.model import Model

        return Model(self.workload, self.layers(), sparse=sparse, device=device)

    def optimizer(self, parameters: Any) -> Any:
        """The workload's, for engines that take any of torch's."""
        import torch

        if self.workload.adamw is None:
            return self.adagrad(parameters)
        options: dict[str, Any] = self.workload.adamw
        return torch.optim.AdamW(parameters, self.workload.learning_rate, **options)

    def adagrad(self, parameters: Any) -> Any:
        import torch

        self.workload.check_adagrad()
        torch.sparse.check_sparse_tensor_invariants.disable()  # Or Adagrad warns that it is off.
        workload = self.workload
        return torch.optim.Adagrad(
            parameters, workload.learning_rate, initial_accumulator_value=workload.accumulator
        )

    def batches(self) -> Iterator[tuple[list[Tensor], ...]]:
        from benchmarks.workloads.model import batches

        return batches(self.workload, self.rank)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def train(
    task: Task, model: nn.Module, optimizer: Any, batches: Iterator[Any] | None = None
) -> Trainer:
    """The loop of an ordinary script."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return loop(task, model, lambda loss: loss.backward(), update, batches or task.batches())


def loop(
    task: Task,
    forward: Callable[..., Tensor],
    backward: Callable[[Tensor], object],
    update: Callable[[], object],
    batches: Iterator[Any],
) -> Trainer:
    """A step ends with the next batch: what an engine does for it belongs to this turn."""
    ids, others = next(batches)

    def turn(num_steps: int) -> float:
        nonlocal ids, others
        for _ in range(num_steps):
            with task.span("forward"):
                loss = forward(ids, others)
            with task.span("backward"):
                backward(loss)
            with task.span("update"):
                update()
            with task.span("batch"):
                ids, others = next(batches)
        return float(loss.detach())

    return turn
