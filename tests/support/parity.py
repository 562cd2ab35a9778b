"""The main test: N workers end where one process on the joined batch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.models import OPTIMIZERS, Batch, Lookup, make_batches

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass(frozen=True)
class Case:
    """A model, an optimizer and options, by names that a worker can be told."""

    form: str
    optimizer: str = "adagrad"
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    shares: tuple[int, ...] | None = None
    """Samples of each worker in a step of 12; None: as even as possible."""
    num_steps: int = 20


def build(case: Case) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(7)
    model = Lookup(case.form).to(case.dtype)
    if case.optimizer == "sparseadam":
        table = [p for n, p in model.named_parameters() if n == model.table_name]
        rest = [p for n, p in model.named_parameters() if n != model.table_name]
        return model, [torch.optim.SparseAdam(table, lr=0.01), torch.optim.Adam(rest, lr=0.01)]
    return model, [OPTIMIZERS[case.optimizer](model.parameters())]


def train_alone(case: Case, *, lazy: bool = False) -> dict[str, Tensor]:
    """One process, plain torch, the joined batch."""
    model, optimizers = build(case)
    for batch in make_batches(case.num_steps, dtype=case.dtype):
        model(batch).backward()
        kept = _kept_rows(model, optimizers, batch) if lazy else None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if kept is not None:
            kept()
    return model.state_dict()


def train_together(case: Case) -> tuple[dict[str, Tensor], str]:
    """A worker: its share of each batch. Returns rank 0's full state and the table's route."""
    import parallax

    model, optimizers = build(case)
    with parallax.parallelize(model, optimizers, **case.options) as session:
        take_steps(session, model, optimizers, case)
        return session.state_dict(), session.plan[model.table_name].route.value


def take_steps(session: Any, model: nn.Module, optimizers: Sequence[Optimizer], case: Case) -> None:
    for batch in make_batches(case.num_steps, dtype=case.dtype):
        mine = share(batch, session.rank, session.num_workers, case.shares)
        session.weight(len(mine[0]))
        model(mine).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def share(batch: Batch, rank: int, num_workers: int, shares: Sequence[int] | None) -> Batch:
    """This worker's part of a batch."""
    size = len(batch[0])
    if shares is None:
        shares = [
            (size * (r + 1)) // num_workers - (size * r) // num_workers for r in range(num_workers)
        ]
    start = sum(shares[:rank])
    return batch[0][start : start + shares[rank]], batch[1][start : start + shares[rank]]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
            msg=lambda m, n=name: f"{n}: {m}",
        )


def _kept_rows(model: Lookup, optimizers: list[Optimizer], batch: Batch) -> Callable[[], None]:
    """What lazy means, told in another way: after the dense step, untouched rows are as before."""
    table = dict(model.named_parameters())[model.table_name]
    touched = torch.zeros(len(table), dtype=torch.bool)
    touched[batch[0].unique()] = True
    if "padding" in model.form:
        touched[0] = False
    before = table.detach().clone()
    states = [
        {k: v.clone() for k, v in o.state.get(table, {}).items() if v.shape == table.shape}
        for o in optimizers
    ]

    def restore() -> None:
        with torch.no_grad():
            table[~touched] = before[~touched]
            for optimizer, state in zip(optimizers, states, strict=True):
                for key, value in optimizer.state.get(table, {}).items():
                    if isinstance(value, Tensor) and value.shape == table.shape:
                        old = state.get(key, torch.zeros_like(value))
                        value[~touched] = old[~touched]

    return restore
