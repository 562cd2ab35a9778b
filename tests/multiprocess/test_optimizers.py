"""Optimizers beside the plain case: groups, several of them, precision, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import NUM_ROWS, WIDTH, Batch, Lookup, make_batches
from tests.support.parity import assert_same, share
from tests.support.workers import run_workers


def loop(session: Any, model: Any, optimizers: list[Any], batches: list[Batch]) -> None:
    for batch in batches:
        if session is not None:
            batch = share(batch, session.rank, session.num_workers, (5, 7))
            session.weight(len(batch[0]))
        model(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def several(how: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(2)
    model = Lookup("padding").double()
    table, rest = [model.table.weight], list(model.out.parameters())
    if how == "groups":
        groups = [{"params": table, "lr": 0.3}, {"params": rest, "weight_decay": 0.1}]
        return model, [torch.optim.Adagrad(groups, lr=0.1)]
    return model, [torch.optim.SGD(table, lr=0.3), torch.optim.Adam(rest, lr=0.01)]


def train_several(how: str) -> dict[str, Tensor]:
    import parallax

    model, optimizers = several(how)
    session = parallax.parallelize(model, optimizers)
    assert session.plan["table.weight"].route.value == "sharded"
    loop(session, model, optimizers, make_batches(dtype=torch.float64))
    return session.state_dict()


@pytest.mark.parametrize("how", ["groups", "separate"])
def test_groups_and_separate_optimizers(how: str) -> None:
    model, optimizers = several(how)
    loop(None, model, optimizers, make_batches(dtype=torch.float64))
    found = run_workers(train_several, 2, how)[0]
    assert_same(found, model.state_dict(), torch.float64)


class Alike(nn.Module):
    """Tables of one shape, which part ways: some have no part in some batches."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tables = nn.ModuleList(nn.Embedding(20, 4, sparse=sparse) for _ in range(3))

    def forward(self, number: int, ids: Tensor) -> Tensor:
        used = [i for i in range(3) if (i != 1 or number % 2) and (i, number) != (2, 5)]
        return torch.stack([self.tables[i](ids * (i + 1) % 20).tanh() for i in used]).mean()


_STEPPED: dict[str, Any] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5, lr_decay=0.3),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
}


def alike(kind: str, workers: int, forgets: bool = False) -> tuple[dict[str, Tensor], list[float]]:
    """Train, with a step that fails; the tables, and how many steps each has had."""
    import parallax

    model = Alike(kind == "SparseAdam").double()
    optimizer = _STEPPED[kind](model.parameters())
    session = parallax.parallelize(model, optimizer) if workers > 1 else None
    generator = torch.Generator().manual_seed(1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in range(7):
        ids = torch.randint(20, (8,), generator=generator)
        if session is not None:
            ids = ids[session.rank :: workers]
        model(number, ids).backward()
        if number == 4:
            handle = optimizer.register_step_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            handle.remove()
            if forgets:  # What this batch brought.
                optimizer.zero_grad()
                optimizer.load_state_dict(optimizer.state_dict())
                model(number, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = [float(optimizer.state[t.weight].get("step", 0)) for t in model.tables]
    return (model if session is None else session).state_dict(), steps


@pytest.mark.parametrize("kind", _STEPPED)
def test_tables_of_a_kind_step_as_each_alone(kind: str) -> None:
    expected, steps = alike(kind, 1)
    for forgets in (False, True):
        outcomes = run_workers(alike, 2, kind, 2, forgets)
        assert_same(outcomes[0][0], expected, torch.float64)
        assert [found for _, found in outcomes] == [steps, steps]
    assert kind == "SGD" or steps == [7, 3, 6]


def autocast(together: bool) -> dict[str, Tensor]:
    import parallax

    torch.manual_seed(2)
    model = Lookup("several")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer) if together else None
    for batch in make_batches():
        if session is not None:
            batch = share(batch, session.rank, session.num_workers, (5, 7))
            session.weight(len(batch[0]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if session is None else session.state_dict()


def test_bf16_autocast() -> None:
    found, expected = run_workers(autocast, 2, True)[0], autocast(False)
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        # The dense layer works in bfloat16, whose rounding depends on how a batch is cut: its
        # gradients carry 8 bits. The tables' own arithmetic stays float32.
        torch.testing.assert_close(found[name], value, atol=2e-2, rtol=2e-2)


def scaled(together: bool) -> tuple[dict[str, Tensor], float]:
    import parallax

    torch.manual_seed(2)
    model = Lookup("padding").double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = parallax.parallelize(model, optimizer) if together else None
    for step, batch in enumerate(make_batches(dtype=torch.float64)):
        if step == 4:  # one sample of worker 0 overflows: all workers must skip the step
            batch[1][0] = float("inf")
        if session is not None:
            batch = share(batch, session.rank, session.num_workers, (5, 7))
            session.weight(len(batch[0]))
        scaler.scale(model(batch)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = model.state_dict() if session is None else session.state_dict()
    return state, scaler.get_scale()


def test_gradient_scaling_skips_the_same_steps_everywhere() -> None:
    expected, scale = scaled(False)
    found = run_workers(scaled, 2, True)
    assert {scale for _, scale in found} == {scale}
    assert_same(found[0][0], expected, torch.float64)


def refusals() -> None:
    import parallax
    from parallax.errors import ConfigError, UnsupportedError, WholeTableError

    def start(model: nn.Module, optimizer: Any, **options: Any) -> Any:
        return parallax.parallelize(model, optimizer, **options)

    model = Lookup("embedding")
    with pytest.raises(UnsupportedError, match="LBFGS"):
        start(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="Adafactor does not work element by element"):
        start(model, torch.optim.Adafactor(model.parameters()), routes={"table.*": "sharded"})
    with pytest.raises(UnsupportedError, match="Adam with differentiable=True"):
        adam = torch.optim.Adam(model.parameters(), differentiable=True)
        start(model, adam, routes={"table.*": "sharded"})
    with pytest.raises(
        ConfigError, match="no optimizer given to parallelize\\(\\) has 'out.weight'"
    ):
        start(model, torch.optim.SGD([model.table.weight], lr=0.1))
    foreign = nn.Parameter(torch.zeros(7))
    with pytest.raises(ConfigError, match=r"shape \(7,\) that is not the model's"):
        start(model, torch.optim.SGD([*model.parameters(), foreign], lr=0.1))
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        bad = nn.ModuleDict({"table": nn.Embedding(NUM_ROWS, WIDTH, **option)})
        with pytest.raises(UnsupportedError, match=next(iter(option))):
            start(bad, torch.optim.SGD(bad.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="takes an nn.Module, not int"):
        start(3, optimizer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pattern 'tabel.weight', which no parameter matches"):
        start(model, optimizer, routes={"tabel.weight": "sharded"})
    with pytest.raises(ConfigError, match="unknown option 'lasy'"):
        start(model, optimizer, lasy=True)
    session = start(model, optimizer)
    model(make_batches(1)[0]).backward()
    with pytest.raises(WholeTableError, match="needs the whole gradient of 'table.weight'"):
        _ = model.table.weight.grad + 1
    with pytest.raises(UnsupportedError, match="max_norm"):
        torch.nn.functional.embedding(torch.tensor([1]), model.table.weight, max_norm=1.0)
    session.close()


def test_what_cannot_be_exact_is_refused_by_name() -> None:
    run_workers(refusals, 2)


def unknown_optimizer() -> str:
    import parallax

    model = Lookup("embedding")
    session = parallax.parallelize(model, torch.optim.Adafactor(model.parameters()))
    return session.plan["table.weight"].why


def test_unknown_optimizers_keep_tables_dense() -> None:
    why = "Adafactor does not work element by element: it needs the whole parameter"
    assert run_workers(unknown_optimizer, 2)[0] == why
