"""Tables that share storage, state and updates end where each alone in one process would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.support.workers import run_workers

SAMPLES, BATCH, EPOCHS = 48, 12, 2


@dataclass(frozen=True)
class Script:
    optimizer: str = "Adagrad"
    skips: bool = False
    """One table is looked up in every second step only."""
    sharding: str = "even"
    names_ids: str = ""
    """What `shard(ids=…)` is told of the hashed lookups: right or wrong ids, or nothing."""
    reads_columns: bool = True
    dtype: torch.dtype = torch.float64


class Net(nn.Module):
    """Tables of two widths, two of them with another learning rate; one has hashed ids."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.narrow = nn.ModuleList(nn.Embedding(rows, 3) for rows in (1, 2, 17, 40))
        self.wide = nn.ModuleList(nn.Embedding(rows, 5) for rows in (30, 8))
        self.hashed = nn.Embedding(64, 3)
        self.out = nn.Linear(3, 1)
        self.num_steps = 0

    def forward(self, batch: Tensor) -> Tensor:
        found = [
            table(batch[:, i] % table.num_embeddings)
            if not self.script.reads_columns or table.num_embeddings < 40
            else table(batch[:, i])
            for i, table in enumerate(self.narrow)
            if not (self.script.skips and i == 2 and self.num_steps % 2)
        ]
        wide = [table(batch[:, i] % table.num_embeddings) for i, table in enumerate(self.wide)]
        total = sum(found) + sum(wide)[:, :3] * sum(wide)[:, 2:] + self.hashed(hash_ids(batch))
        return self.out(total).square().mean()


def hash_ids(batch: Tensor) -> Tensor:
    return (batch[:, 0] * 31 + batch[:, 1] * 7) % 64


def make_optimizer(model: Net, script: Script) -> Optimizer:
    slow = [*model.wide.parameters(), model.narrow[2].weight]
    fast = [p for p in model.parameters() if all(p is not other for other in slow)]
    rate = 0.01 if script.optimizer == "SGD" else 0.1
    groups = [{"params": fast, "lr": rate}, {"params": slow, "lr": rate / 10}]
    found: Optimizer = getattr(torch.optim, script.optimizer)(groups, lr=rate)
    return found


def make_data() -> Any:
    return torch.randint(40, (SAMPLES, 4), generator=torch.Generator().manual_seed(1))


def train(script: Script) -> tuple[dict[str, Tensor], list[float]]:
    """Return rank 0's state, and the early rows of the hashed table by step."""
    import parallax
    from parallax.comm import pull
    from parallax.tables.rowmap import RowMap, multiplier_of

    pull.EARLY_BYTES = 0

    def uneven(num_rows: int, num_workers: int) -> RowMap:
        """The last owner has most rows, the first one none."""
        inner = tuple(num_rows * i // (4 * num_workers) for i in range(num_workers))
        return RowMap(num_rows, (*inner, num_rows), multiplier_of(num_rows))

    if script.sharding == "uneven":
        RowMap.even = staticmethod(uneven)  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = Net(script).to(script.dtype)
    optimizer = make_optimizer(model, script)
    session = parallax.parallelize(
        model,
        optimizer,
        routes={"narrow.*": "sharded", "wide.*": "sharded", "hashed.*": "sharded"},
        lazy=True,
        replan=False,
    )
    functions = {"right": hash_ids, "wrong": lambda batch: hash_ids(batch + 1)}
    ids = {"hashed.weight": functions[script.names_ids]} if script.names_ids else None
    loader = session.shard(DataLoader(make_data(), BATCH), split=True, ids=ids)
    for _ in range(EPOCHS):
        for batch in loader:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.num_steps += 1
    steps = [record.parameters["hashed.weight"] for record in session.ledger.steps]
    state = session.state_dict()
    session.close()
    return state, [entry.early_rows for entry in steps]


def train_alone(script: Script) -> dict[str, Tensor]:
    """Plain torch, in which untouched rows are put back after each step: what lazy means."""
    torch.manual_seed(0)
    model = Net(script).to(script.dtype)
    optimizer = make_optimizer(model, script)
    tables = [*model.narrow, *model.wide, model.hashed]
    for _ in range(EPOCHS):
        for batch in DataLoader(make_data(), BATCH):
            model(batch).backward()
            before = [table.weight.detach().clone() for table in tables]
            states = [
                {k: v.clone() for k, v in optimizer.state[t.weight].items() if v.dim()}
                for t in tables
            ]
            touched = [
                None if t.weight.grad is None else (t.weight.grad != 0).any(1) for t in tables
            ]
            optimizer.step()
            optimizer.zero_grad()
            model.num_steps += 1
            with torch.no_grad():
                for table, old, state, rows in zip(tables, before, states, touched, strict=True):
                    if rows is None:
                        continue
                    table.weight[~rows] = old[~rows]
                    for key, value in optimizer.state[table.weight].items():
                        if value.dim():
                            value[~rows] = state[key][~rows] if key in state else 0.0
    return model.state_dict()


SCRIPTS = {
    "Adagrad": Script(),
    "SGD": Script("SGD"),
    "lazy Adam": Script("Adam"),
    "lazy Adam, a table that is not used in every step": Script("Adam", skips=True),
    "Adagrad, a table that is not used in every step": Script(skips=True),
    "shards of other sizes": Script("Adam", sharding="uneven"),
    "ids that the script names": Script(names_ids="right"),
    "wrong ids that the script names": Script(names_ids="wrong"),
    "float32": Script(dtype=torch.float32),
}


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_groups_are_exact(name: str, num_workers: int) -> None:
    script = SCRIPTS[name]
    found = run_workers(train, num_workers, script)[0][0]
    tolerance = 1e-10 if script.dtype is torch.float64 else 1e-5
    for key, value in train_alone(script).items():
        torch.testing.assert_close(
            found[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_rows_of_ids_that_the_script_names_come_early() -> None:
    for _, early in run_workers(train, 2, Script(names_ids="right")):
        assert sum(early[2:]) > 0
    for _, early in run_workers(train, 2, Script()):
        assert sum(early) == 0


def name_nothing() -> None:
    import parallax

    model = nn.Embedding(8, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, routes={"*": "sharded"})
    with session, pytest.raises(parallax.errors.ConfigError, match=r"'table'.*Tables: 'weight'"):
        session.shard(DataLoader(make_data(), 4), ids={"table": hash_ids})


def test_names_that_are_no_tables_are_refused() -> None:
    run_workers(name_nothing, 2)


def change_state() -> tuple[list[bool], dict[str, Tensor]]:
    """Train a step, clear the accumulators through `optimizer.state`, train another."""
    import parallax

    torch.manual_seed(0)
    model = nn.ModuleList(nn.Embedding(20, 3) for _ in range(2)).double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with parallax.parallelize(model, optimizer, routes={"*": "sharded"}) as session:
        seen = []
        for _ in range(2):
            ids = (
                torch.arange(12)
                if session.num_workers == 1
                else torch.arange(12)[session.rank :: 2]
            )
            sum(table(ids).square().mean() for table in model).backward()
            before = [optimizer.state[table.weight]["sum"] for table in model]
            sums = [each.sum().item() for each in before]
            optimizer.step()
            optimizer.zero_grad()
            after = [optimizer.state[table.weight]["sum"] for table in model]
            seen += [a is b for a, b in zip(after, before, strict=True)]
            seen += [each.sum().item() > s for each, s in zip(after, sums, strict=True)]
            for each in after:
                each.zero_()
        return seen, session.state_dict()


def test_the_state_of_a_table_is_a_live_view() -> None:
    ((_, alone),) = run_workers(change_state, 1)
    results = run_workers(change_state, 2)
    for seen, _ in results:
        assert all(seen)
    for key, value in alone.items():
        torch.testing.assert_close(results[0][1][key], value, rtol=1e-10, atol=1e-10)
