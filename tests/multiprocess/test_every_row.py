"""Optimizers that change every row: tables are sharded, and N workers equal one process.

All optimizers train in one session, each a small model of its own, because starting workers takes
longer than training does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.support.parity import assert_same
from tests.support.workers import run_workers

STEPS, BATCH, SAVED_AT = 30, 12, 15
SCALED, SKIPPED = (9, 11), 11


class Lion(Optimizer):
    """An optimizer of another package, element by element."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})
        self.beta = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["average"] = 0, torch.full_like(p, 0.01)
                state["count"] += 1
                average = state["average"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_((average + p.grad).tanh(), alpha=group["lr"] / state["count"] ** 0.5)
                state["average"] = average * self.beta + p.grad * (1 - self.beta)


class Scribbling(torch.optim.SGD):
    """A subclass with a step of its own, which writes into the gradient of untouched rows too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.1)
                    p.sub_(p.grad, alpha=group["lr"])


class Normed(torch.optim.SGD):
    """Needs the norm of the whole parameter, so its tables cannot be sharded."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * float(p.norm()))


Make = Callable[[Iterable[Any]], Optimizer]
o = torch.optim
EVERY_ROW: dict[str, Make] = {
    "adam": lambda p: o.Adam(p, lr=0.01),
    "adam-decay": lambda p: o.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: o.Adam(p, lr=0.01, amsgrad=True),
    "adam-maximize": lambda p: o.Adam(p, lr=0.001, maximize=True),
    "adam-foreach": lambda p: o.Adam(p, lr=0.01, foreach=True),
    "adamw": lambda p: o.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw-fused": lambda p: o.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "momentum": lambda p: o.SGD(p, lr=0.05, momentum=0.9),
    "dampening": lambda p: o.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": lambda p: o.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "nesterov-foreach": lambda p: o.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "sgd-decay": lambda p: o.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd-fused": lambda p: o.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "adagrad-decay": lambda p: o.Adagrad(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: o.RMSprop(p, lr=0.01),
    "rmsprop-centered": lambda p: o.RMSprop(
        p, lr=0.01, centered=True, momentum=0.5, weight_decay=0.1
    ),
    "nadam": lambda p: o.NAdam(p, lr=0.01),
    "nadam-decay": lambda p: o.NAdam(p, lr=0.01, weight_decay=0.1),
    "radam": lambda p: o.RAdam(p, lr=0.01),
    "radam-decay": lambda p: o.RAdam(p, lr=0.01, weight_decay=0.1),
    "adadelta": lambda p: o.Adadelta(p, lr=1.0),
    "adadelta-decay": lambda p: o.Adadelta(p, lr=1.0, weight_decay=0.1),
    "adamax": lambda p: o.Adamax(p, lr=0.01),
    "adamax-decay": lambda p: o.Adamax(p, lr=0.01, weight_decay=0.1),
    "rprop": lambda p: o.Rprop(p, lr=0.01),
    "asgd": lambda p: o.ASGD(p, lr=0.05, t0=5, weight_decay=0.1),
    "lion": lambda p: Lion(p),
    "scribbling": lambda p: Scribbling(p, lr=0.05),
}
OTHERS: dict[str, Make] = {
    "adagrad": lambda p: o.Adagrad(p, lr=0.1, lr_decay=0.1),
    "normed": lambda p: Normed(p, lr=0.01),
    "adafactor": lambda p: o.Adafactor(p, lr=0.01),
}


class Tower(nn.Module):
    """Tables that share a group, one with other options, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 3) for rows in (150, 2))
        self.other = nn.Embedding(50, 3, padding_idx=1)
        self.out = nn.Linear(3, 1)

    def forward(self, ids: Tensor, unused: set[int]) -> Tensor:
        looked_up = [
            table(ids[:, number] % table.num_embeddings)
            for number, table in enumerate(self.tables)
            if number not in unused
        ]
        hidden = torch.stack([*looked_up, self.other(ids % 50).mean(1)]).sum(0)
        return self.out(hidden.tanh()).square().mean()

    def groups(self) -> list[dict[str, Any]]:
        rest = [*self.tables.parameters(), *self.out.parameters()]
        return [{"params": rest}, {"params": [self.other.weight], "lr": 0.02}]


class Towers(nn.Module):
    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.towers = nn.ModuleDict({name: Tower() for name in names})
        self.double()

    def forward(self, ids: Tensor, unused: set[int]) -> Tensor:
        return torch.stack([tower(ids, unused) for tower in self.towers.values()]).sum()

    def optimizers(self) -> list[Optimizer]:
        made = {**EVERY_ROW, **OTHERS}
        return [made[name](tower.groups()) for name, tower in self.towers.items()]


def batches() -> list[Tensor]:
    """Ids of which most rows are never touched."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(25, (2 * STEPS, BATCH, 2), generator=generator))


class Loop:
    """A training with everything that a script may do between two steps."""

    def __init__(self, names: Iterable[str], together: bool) -> None:
        import parallax

        self.model = Towers(names)
        self.optimizers = self.model.optimizers()
        self.session: Any = None
        if together:
            self.session = parallax.parallelize(self.model, self.optimizers, replan=False)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
        # Tables take part from different steps on, and not in each.
        self.schedulers = [o.lr_scheduler.ExponentialLR(each, 0.97) for each in self.optimizers]

    def run(self, first: int = 0, end: int = STEPS) -> None:
        for number in range(first, end):
            self._freeze(20 <= number < 23)
            self._backward(number)
            if number % 6 == 4:
                self._clip()
            for optimizer in self.optimizers:
                if number in SCALED:
                    self.scaler.step(optimizer)
                else:
                    optimizer.step()
            if number in SCALED:
                self.scaler.update()
            for scheduler in self.schedulers:
                scheduler.step()
            self._zero(number)

    def _clip(self) -> None:
        if self.session is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        else:
            self.session.clip_grad_norm_(0.5)

    def _freeze(self, is_frozen: bool) -> None:
        for tower in self.model.towers.values():
            tower.tables[0].weight.requires_grad_(not is_frozen)

    def _backward(self, number: int) -> None:
        unused = {1} if number < 4 else {0} if number % 5 == 2 else set()
        parts = [2 * number, 2 * number + 1] if number % 7 == 3 else [2 * number]
        for part in parts:
            ids = batches()[part]
            if self.session is not None:
                ids = self._mine(ids, 0 if number == 8 else 1)
                self.session.weight(len(ids))
            is_last = part == parts[-1]
            postponed = self.session is not None and not is_last
            with self.session.no_sync() if postponed else nullcontext():
                loss = self.model(ids, unused)
                if number in SCALED:  # In the second of them all skip the step.
                    loss = self.scaler.scale(loss * (float("inf") if number == SKIPPED else 1.0))
                loss.backward()

    def _mine(self, ids: Tensor, spread: int) -> Tensor:
        """Uneven shares; without `spread` the last worker has all samples."""
        if not spread:
            return ids if self.session.rank == self.session.num_workers - 1 else ids[:0]
        edges = [*[0, 5, 7, 11][: self.session.num_workers], BATCH]
        return ids[edges[self.session.rank] : edges[self.session.rank + 1]]

    def _zero(self, number: int) -> None:
        keep_zeros = number % 4 == 1
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not keep_zeros)
        if number == 13:  # With zeros, which step.
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad()


def counters(loop: Loop) -> dict[str, Any]:
    """The parts of the optimizers' state that belong to a table as a whole."""
    names = {id(p): name for name, p in loop.model.named_parameters()}
    return {
        f"{names[id(parameter)]} {key}": float(value)
        for optimizer in loop.optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None and (not isinstance(value, Tensor) or value.dim() == 0)
    }


def train(names: list[str]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    loop = Loop(names, together=True)
    loop.run()
    plan = loop.session.plan
    routes = {
        name: plan[f"towers.{name}.tables.0.weight"].route.value for name in loop.model.towers
    }
    with loop.session:
        return loop.session.state_dict(), counters(loop), routes


@pytest.fixture(scope="module")
def alone() -> Loop:
    loop = Loop([*EVERY_ROW, *OTHERS], together=False)
    loop.run()
    return loop


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_each_optimizer_ends_where_one_process_does(num_workers: int, alone: Loop) -> None:
    results = run_workers(train, num_workers, [*EVERY_ROW, *OTHERS])
    assert_same(results[0][0], alone.model.state_dict(), torch.float64)
    for _, found, routes in results:
        assert found == pytest.approx(counters(alone), rel=1e-12)
        dense = {name for name, route in routes.items() if route != "sharded"}
        assert dense == {"normed", "adafactor"}


# Checkpoints ------------------------------------------------------------------------------

SAVED = ["adam-decay", "amsgrad", "momentum", "nadam", "rprop", "lion"]


def train_and_save(folder: str) -> None:
    loop = Loop(SAVED, together=True)
    loop.run(end=SAVED_AT)
    loop.session.save(folder)
    loop.session.close()


def load_and_train(folder: str) -> dict[str, Tensor]:
    loop = Loop(SAVED, together=True)
    loop.session.load(folder)
    for scheduler in loop.schedulers:
        scheduler.last_epoch = SAVED_AT
    loop.run(first=SAVED_AT)
    return loop.session.state_dict()  # type: ignore[no-any-return]


def test_a_checkpoint_goes_on_at_other_numbers_of_workers(tmp_path: Path) -> None:
    """With one worker no table is sharded: that is plain torch."""
    loop = Loop(SAVED, together=False)
    loop.run()
    run_workers(train_and_save, 3, str(tmp_path))
    for num_workers in (1, 2):
        found = run_workers(load_and_train, num_workers, str(tmp_path))[0]
        assert_same(found, loop.model.state_dict(), torch.float64)


# Prefetch ---------------------------------------------------------------------------------


class Pair(nn.Module):
    """A table of which every row changes, and one whose untouched rows do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.changing, self.still = nn.Embedding(60, 3), nn.Embedding(60, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.changing(ids[:, 0]) * self.still(ids[:, 1])).sum(1).square().mean()


def data() -> Any:
    return torch.randint(60, (16 * BATCH, 2), generator=torch.Generator().manual_seed(1))


def train_pair(adam: bool) -> tuple[dict[str, Tensor], dict[str, list[float]], list[Any]]:
    """Feed two tables by a loader. Without Adam, weight decay is set in the middle."""
    import parallax

    model = Pair().double()
    kind: Any = o.Adam if adam else o.SGD
    optimizers = [kind([model.changing.weight], lr=0.1), o.SGD([model.still.weight], lr=0.1)]
    session = parallax.parallelize(model, optimizers, replan=False)
    rules = []
    for number, ids in enumerate(session.shard(DataLoader(data(), BATCH), split=True)):
        if not adam and number == 8:
            optimizers[0].param_groups[0]["weight_decay"] = 0.1
        model(ids).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        rules.append(session.plan["changing.weight"].row_rule)
    early = {
        name: [step.parameters[f"{name}.weight"].early_rows for step in session.ledger.steps]
        for name in ("changing", "still")
        if session.num_workers > 1
    }
    state = session.state_dict()
    session.close()
    return state, early, rules


def train_pairs() -> list[tuple[dict[str, Tensor], dict[str, list[float]], list[Any]]]:
    from parallax.comm import pull

    pull.EARLY_BYTES = 0
    return [train_pair(True), train_pair(False)]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_rows_come_after_the_update_where_every_row_changes(num_workers: int) -> None:
    expected = train_pairs()
    adam, decay = run_workers(train_pairs, num_workers)[0]
    for found, alone in zip((adam, decay), expected, strict=True):
        assert_same(found[0], alone[0], torch.float64)
    assert sum(adam[1]["changing"]) == 0
    assert sum(adam[1]["still"][3:]) > 0
    assert sum(decay[1]["changing"][:8]) > 0  # Before it was set.
    assert sum(decay[1]["changing"][10:]) == 0
    assert decay[2] == ["touched rows"] * 8 + ["every row"] * 8


# Options that a scheduler sets ------------------------------------------------------------


def one_cycle() -> dict[str, Tensor]:
    import parallax

    model = Pair().double()
    optimizer = o.SGD(model.parameters(), lr=0.1)
    with parallax.parallelize(model, optimizer, replan=False) as session:
        scheduler = o.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=16)
        for ids in session.shard(DataLoader(data(), BATCH), split=True):
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return session.state_dict()


def test_momentum_that_a_scheduler_sets_is_exact() -> None:
    assert_same(run_workers(one_cycle, 2)[0], one_cycle(), torch.float64)


# Kernels ----------------------------------------------------------------------------------


def kernels_of(options: dict[str, Any], default_dtype: torch.dtype) -> list[bool]:
    """Return which groups of an optimizer use the fused kernel while it steps."""
    import parallax

    model = nn.ModuleList([nn.Embedding(20, 3), nn.Linear(3, 1)]).float()
    optimizer = o.AdamW(model.parameters(), lr=0.1, **options)
    seen: list[bool] = []
    torch.set_default_dtype(default_dtype)
    with parallax.parallelize(model, optimizer) as session:
        groups = list(optimizer.param_groups)
        optimizer.register_step_pre_hook(
            lambda *_: seen.extend(bool(group["fused"]) for group in optimizer.param_groups)
        )
        interrupt = optimizer.register_step_pre_hook(_interrupt)
        for number in range(2):
            model[1](model[0](torch.arange(session.rank, 20, 2))).sum().backward()
            if number == 0:
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                interrupt.remove()
                assert len(optimizer.state_dict()["param_groups"]) == 1
                seen.clear()
            optimizer.step()
            assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
            assert groups[0]["fused"] == options.get("fused")
            assert [tuple(p.shape) for p in groups[0]["params"]] == [(20, 3), (1, 3), (1,)]
    torch.set_default_dtype(torch.float32)
    return seen


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def kernels() -> dict[str, list[bool]]:
    single = torch.float32
    return {
        "nothing": kernels_of({}, single),
        "fused": kernels_of({"fused": True}, single),
        "not fused": kernels_of({"fused": False}, single),
        "foreach": kernels_of({"foreach": True}, single),
        "neither": kernels_of({"foreach": False}, single),
        "double": kernels_of({}, torch.float64),
    }


def test_the_fused_kernel_is_taken_where_the_user_chose_none() -> None:
    for found in run_workers(kernels, 2):
        assert found.pop("nothing") == [False, True] * 2
        assert found.pop("fused") == [True] * 2
        assert set(map(tuple, found.values())) == {(False, False)}
