"""The session around training: its life, its plan, its state, its errors."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import NUM_ROWS, WIDTH, Lookup, make_batches
from tests.support.parity import assert_same
from tests.support.workers import run_workers


def make(form: str = "embedding", **options: Any) -> tuple[Any, Any, Any]:
    import parallax

    torch.manual_seed(0)
    model = Lookup(form)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, optimizer, parallax.parallelize(model, optimizer, **options)


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for batch in make_batches(steps):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


# Life -------------------------------------------------------------------------------------


def two_lives() -> None:
    import parallax

    for form in ("embedding", "getitem", "tied-in-forward", "embedding"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, optimizer, session = make(form)
            with session:
                train(model, optimizer)
                with pytest.raises(parallax.errors.ConfigError, match="parallelized already"):
                    parallax.parallelize(model, optimizer)
            session.close()
        if form == "embedding":
            with pytest.raises(parallax.errors.ParallaxError, match="its session is closed"):
                model(make_batches(1)[0])


@pytest.mark.parametrize("num_workers", [2, 3])
def test_after_close_another_model_may_begin(num_workers: int) -> None:
    run_workers(two_lives, num_workers)


def test_a_dropped_session_is_still_open() -> None:
    import parallax

    model, optimizer, session = make()
    del session
    gc.collect()
    with pytest.raises(parallax.errors.ConfigError, match="parallelized already"):
        parallax.parallelize(model, optimizer)
    kept = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert kept() is None


def test_with_one_process_nothing_is_changed() -> None:
    model, optimizer, session = make()
    assert type(model.table.weight) is nn.Parameter
    assert (session.rank, session.num_workers, session.local_rank) == (0, 1, 0)
    train(model, optimizer)
    session.close()
    torch.manual_seed(0)
    plain = Lookup("embedding")
    train(plain, torch.optim.Adagrad(plain.parameters(), lr=0.1))
    assert_same(model.state_dict(), plain.state_dict(), torch.float32)


def test_close_gives_a_lazy_table_of_one_process_back() -> None:
    import parallax

    torch.manual_seed(0)
    model = Lookup("embedding")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with parallax.parallelize(model, optimizer, lazy=True) as session:
        assert type(model.table.weight) is not nn.Parameter
        train(model, optimizer)
        state = session.state_dict()
    assert type(model.table.weight) is nn.Parameter
    assert_same(model.state_dict(), state, torch.float32)
    train(model, optimizer)  # as plain torch, with the optimizer's state kept


def rank_0_wins() -> dict[str, Tensor]:
    import os

    import parallax

    torch.manual_seed(int(os.environ["RANK"]))
    model = Lookup("several")
    model.register_buffer("noise", torch.randn(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, routes={"weight": "sharded"})
    assert torch.equal(model.noise, _as_rank_0(model.noise))
    return session.state_dict()


def _as_rank_0(value: Tensor) -> Tensor:
    import torch.distributed as dist

    copied = value.clone()
    dist.broadcast(copied, 0)
    return copied


def test_rank_0_initial_values_win() -> None:
    found = run_workers(rank_0_wins, 3)[0]
    torch.manual_seed(0)
    model = Lookup("several")
    model.register_buffer("noise", torch.randn(3))
    assert_same(found, model.state_dict(), torch.float32)


def buffers_come_later() -> None:
    import parallax

    model = Lookup("embedding")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer)
    train(model, optimizer)
    model.register_buffer("noise", torch.zeros(3))
    model.late = nn.Sequential(nn.BatchNorm1d(3, affine=False))
    for buffer in (model.noise, model.late[0].running_mean):
        buffer.fill_(session.rank)
    train(model, optimizer)
    for buffer in (model.noise, model.late[0].running_mean):
        assert torch.equal(buffer, torch.zeros(3))  # As rank 0 has it.


def test_buffers_that_come_later_are_given_out_too() -> None:
    run_workers(buffers_come_later, 2)


# Identity ---------------------------------------------------------------------------------


def objects_stay() -> None:
    import parallax

    model = Lookup("embedding")
    weight = model.table.weight
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    names = [name for name, _ in model.named_parameters()]
    with parallax.parallelize(model, optimizer) as session:
        assert model.table.weight is weight
        assert isinstance(weight, nn.Parameter)
        assert weight.shape == (NUM_ROWS, WIDTH)
        assert [name for name, _ in model.named_parameters()] == names
        assert sum(p.numel() for p in model.parameters()) == NUM_ROWS * WIDTH + WIDTH + 1
        assert "Table('table.weight'" in repr(weight)
        train(model, optimizer)
        assert optimizer.param_groups[0] is group
        assert any(p is weight for p in group["params"])
        assert len(optimizer.state[weight]["sum"]) == NUM_ROWS // 2
        assert weight.grad is None
        with pytest.raises(parallax.errors.WholeTableError, match=r"session.state_dict\(\)"):
            model.state_dict()
        with pytest.raises(parallax.errors.WholeTableError):
            model.double()
        with torch.no_grad():
            norm = float(weight.norm())  # all rows, without turning the table dense
            assert norm == pytest.approx(float(model_norm(session)), rel=1e-5)
            model.load_state_dict(filled(model, 2.0))
        assert session.plan["table.weight"].route.value == "sharded"
        state = session.state_dict()
        if session.rank == 0:
            assert bool((state["table.weight"] == 2.0).all())
        weight.grad = None
        with pytest.raises(parallax.errors.ParallaxError, match="set to None only"):
            weight.grad = torch.zeros(NUM_ROWS, WIDTH)


def model_norm(session: Any) -> Tensor:
    state = session.state_dict()
    value = state["table.weight"].norm() if state else torch.zeros(())
    return _as_rank_0(value)


def filled(model: nn.Module, value: float) -> dict[str, Tensor]:
    return {n: torch.full(tuple(p.shape), value) for n, p in model.named_parameters()}


def test_model_and_optimizer_stay_the_same_objects() -> None:
    run_workers(objects_stay, 2)


# Plan -------------------------------------------------------------------------------------


def plans() -> tuple[str, str, str]:
    import parallax

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, session = make("tied-in-forward")
        train(model, optimizer)
    session.close()
    said = " ".join(str(w.message) for w in caught)
    torch.manual_seed(0)
    model = Lookup("embedding")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    every_row = parallax.parallelize(model, optimizer)
    return str(session.plan), said, str(every_row.plan)


def test_the_plan_says_why() -> None:
    tied, said, every_row = run_workers(plans, 2)[0]
    assert "used whole by torch.nn.functional.linear" in tied
    assert "parameter 'table.weight' is used whole (by torch.nn.functional.linear)" in said
    assert "only rows of it are looked up; every row is updated by its owner" in every_row


def plan_round_trip() -> None:
    from parallax import Plan

    model, optimizer, session = make("embedding")
    train(model, optimizer)
    plan = session.plan
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["num_workers"] == 2
    assert plan["table.weight"].bytes_per_step > 0


def test_the_plan_survives_json() -> None:
    run_workers(plan_round_trip, 2)


# Numbers ----------------------------------------------------------------------------------


def nonfinite() -> int:
    model, optimizer, session = make("embedding")
    ids, targets = make_batches(1)[0]
    model((ids, targets * float("inf") if session.rank else targets)).backward()
    optimizer.step()
    state = session.state_dict()
    if session.rank == 0:
        assert not bool(state["table.weight"].isfinite().all())
        assert not bool(state["out.weight"].isfinite().all())
    return session.ledger.steps[-1].parameters["table.weight"].nonfinite_rows


def test_nonfinite_gradients_propagate_and_are_counted() -> None:
    found = run_workers(nonfinite, 2)
    touched = make_batches(1)[0][0].unique()
    assert sum(found) == len(touched)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.table(ids)).pow(3).mean()


def buffers() -> Tensor:
    import parallax

    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer)
    for step in range(3):
        model(torch.arange(5) + step + 5 * session.rank).backward()
        optimizer.step()
    assert int(model.norm.num_batches_tracked) == 3
    return model.norm.running_mean.clone()


def test_all_workers_have_the_buffers_of_rank_0() -> None:
    found = run_workers(buffers, 3)
    assert found[0].abs().max() > 0
    assert all(torch.equal(found[0], other) for other in found)


# Data -------------------------------------------------------------------------------------


def train_on_loader(split: bool, epochs: int = 3) -> dict[str, Tensor]:
    import parallax

    torch.manual_seed(4)
    model = Lookup("padding").double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer)
    ids, targets = make_batches(1, size=29, dtype=torch.float64)[0]
    size = 12 if split else 12 // session.num_workers
    loader = DataLoader(TensorDataset(ids, targets), batch_size=size, shuffle=True)
    torch.manual_seed(9)
    batches = session.shard(loader, split=split)
    assert len(batches) == 3
    for _ in range(epochs):
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return session.state_dict()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_training_on_a_sharded_loader_equals_the_loader_of_one(
    num_workers: int, split: bool
) -> None:
    """The last batch has 5 samples; the order is that of one process with the same seed."""
    found = run_workers(train_on_loader, num_workers, split)[0]
    assert_same(found, train_on_loader(True), torch.float64)


def tail() -> dict[str, Tensor]:
    import parallax

    torch.manual_seed(4)
    model = Lookup("padding").double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer)
    ids, targets = make_batches(1, size=13, dtype=torch.float64)[0]
    loader = DataLoader(TensorDataset(ids, targets), batch_size=12 // session.num_workers)
    for batch in session.shard(loader):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return session.state_dict()


def test_a_last_batch_smaller_than_the_number_of_workers() -> None:
    assert_same(run_workers(tail, 4)[0], tail(), torch.float64)
