"""Nothing hangs: a wait ends with an error that names who waited for whom, and where."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from torch import nn

from parallax.errors import (
    MismatchError,
    OutOfStepError,
    PeerError,
    WaitTimeoutError,
    WorkerLostError,
)
from parallax.launch import failure
from tests.support.workers import Outcome, outcomes_of

SECONDS = 4.0


class Net(nn.Module):
    def __init__(self, num_rows: int = 30) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).mean()


def start(num_rows: int = 30):  # type: ignore[no-untyped-def]
    import parallax

    model = Net(num_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, timeout_seconds=SECONDS)
    return model, optimizer, session


def train(model, optimizer, steps: int = 2) -> None:  # type: ignore[no-untyped-def]
    for _ in range(steps):
        model(torch.tensor([1, 2, 3])).backward()
        optimizer.step()
        optimizer.zero_grad()


def errors(outcomes: list[Outcome]) -> list[str]:
    assert all(o.error is not None for o in outcomes if o.exit_code == 0), outcomes
    return [f"{type(o.error).__name__}: {o.error}" for o in outcomes]


def evaluate_alone() -> None:
    model, optimizer, session = start()
    train(model, optimizer)
    if session.rank == 0:
        with torch.no_grad():
            model(torch.tensor([1]))
    else:
        time.sleep(3 * SECONDS)
        raise PeerError("slept")


def test_a_worker_that_evaluates_alone_is_told_whom_it_waited_for() -> None:
    outcomes = outcomes_of(evaluate_alone, 2)
    assert isinstance(outcomes[0].error, WaitTimeoutError)
    text = str(outcomes[0].error)
    assert re.search(r"worker 0 waited \d+ s in a lookup without gradient of 'table.weight'", text)
    assert "for worker 1" in text
    assert "in step 2" in text
    assert "session.state_dict()" in text


def evaluate_while_others_train() -> None:
    model, optimizer, session = start()
    train(model, optimizer)
    if session.rank == 0:
        with torch.no_grad():
            model(torch.tensor([1]))
    else:
        train(model, optimizer)


def test_workers_in_different_lookups_all_see_it_at_once() -> None:
    outcomes = outcomes_of(evaluate_while_others_train, 3)
    assert all(isinstance(o.error, OutOfStepError) for o in outcomes), errors(outcomes)
    assert "worker 0 is in a lookup without gradient of 'table.weight'" in str(outcomes[0].error)
    assert "but worker 0 is in a lookup without gradient" in str(outcomes[2].error)


def skip_a_backward() -> None:
    model, optimizer, session = start()
    train(model, optimizer)
    loss = model(torch.tensor([1]))
    if session.rank == 1:
        time.sleep(3 * SECONDS)
        raise PeerError("slept")
    loss.backward()


def test_a_worker_without_a_backward_is_named() -> None:
    outcomes = outcomes_of(skip_a_backward, 2)
    assert isinstance(outcomes[0].error, WaitTimeoutError), errors(outcomes)
    text = str(outcomes[0].error)
    assert re.search(r"waited \d+ s in the end of backward in step 2 for worker 1", text)


def die() -> None:
    model, optimizer, session = start()
    train(model, optimizer)
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, optimizer)


def test_a_killed_worker_is_named_by_the_others_within_30_seconds() -> None:
    outcomes = outcomes_of(die, 3)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, WorkerLostError), errors(outcomes)
        assert "worker 1 ended or cannot be reached" in str(survivor.error)
        assert survivor.seconds < 30


def bad_id(bad: int) -> None:
    model, optimizer, session = start()
    train(model, optimizer)
    model(torch.tensor([0, 7, bad if session.rank == 1 else 2]))


@pytest.mark.parametrize("bad", [30, -1, 10**12])
def test_bad_ids_raise_on_every_worker(bad: int) -> None:
    outcomes = outcomes_of(bad_id, 3, bad)
    for outcome in outcomes:
        assert isinstance(outcome.error, IndexError)
        expected = (
            f"id {bad} on worker 1 is out of range for table 'table.weight', which has 30 rows"
        )
        assert expected in str(outcome.error)


def float_ids() -> None:
    model, optimizer, session = start()
    train(model, optimizer)
    model(torch.tensor([0.5 if session.rank == 1 else 0]))


def test_float_ids_are_a_type_error_on_every_worker() -> None:
    for outcome in outcomes_of(float_ids, 2):
        assert isinstance(outcome.error, TypeError)
        expected = "the ids on worker 1 for table 'table.weight' must be a tensor of int64 or int32"
        assert expected in str(outcome.error)


def different_models() -> None:
    start(30 + int(os.environ["RANK"]) // 2)


def test_models_that_differ_are_found_at_the_start() -> None:
    for outcome in outcomes_of(different_models, 3):
        assert isinstance(outcome.error, MismatchError)
        assert "'table.weight' (30, 4)" in str(outcome.error)
        assert "'table.weight' (31, 4)" in str(outcome.error)
        assert "worker 2 has" in str(outcome.error)


def different_routes() -> None:
    import parallax

    model = Net()
    routes = {"table.weight": "sharded"} if os.environ["RANK"] == "1" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.parallelize(model, optimizer, routes=routes, timeout_seconds=SECONDS)


def test_a_route_that_only_one_worker_forces_is_found_at_the_start() -> None:
    """The others' plan might change it later, while this one's did not take part."""
    for outcome in outcomes_of(different_routes, 2):
        assert isinstance(outcome.error, MismatchError)
        assert "sharded, forced" in str(outcome.error)
        assert "sharded, free" in str(outcome.error)


def different_optimizers() -> None:
    import parallax

    model = Net()
    kinds = [torch.optim.SGD, torch.optim.Adagrad]
    optimizer = kinds[int(os.environ["RANK"])](model.parameters(), lr=0.1)
    parallax.parallelize(model, optimizer, timeout_seconds=SECONDS)


def test_optimizers_that_differ_are_found_at_the_start() -> None:
    for outcome in outcomes_of(different_optimizers, 2):
        assert isinstance(outcome.error, MismatchError)
        assert "Adagrad" in str(outcome.error)


def state_on_rank_0_only() -> float:
    model, optimizer, session = start()
    train(model, optimizer)
    state = session.state_dict()
    if session.rank == 0:  # alone, while the others go on to the end
        alone = Net()
        alone.load_state_dict(state)
        with torch.no_grad():
            return float(alone(torch.tensor([1, 2])))
    assert state == {}
    return 0.0


def test_rank_0_can_evaluate_alone_in_a_model_of_its_own() -> None:
    outcomes = outcomes_of(state_on_rank_0_only, 2)
    assert [o.error for o in outcomes] == [None, None]


def bad_id_in_a_copy() -> None:
    import parallax

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    routes = {"table.weight": "all-reduce"}
    session = parallax.parallelize(model, optimizer, timeout_seconds=SECONDS, routes=routes)
    train(model, optimizer)
    model(torch.tensor([0, 30 if session.rank == 1 else 2])).backward()


def test_bad_ids_of_an_all_reduced_table_raise_on_every_worker_too() -> None:
    for outcome in outcomes_of(bad_id_in_a_copy, 3):
        assert isinstance(outcome.error, IndexError), outcome
        assert "id 30 on worker 1 is out of range for table 'table.weight'" in str(outcome.error)


def die_after_a_bad_id(steps: int) -> None:
    """Worker 1 has a bad id, goes on without it, and is killed later."""
    import parallax

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    routes = {"table.weight": "all-reduce"}
    session = parallax.parallelize(model, optimizer, timeout_seconds=SECONDS, routes=routes)
    if session.rank == 1:
        with pytest.raises(IndexError, match="id 30 on worker 1"):
            model(torch.tensor([30]))
    model(torch.tensor([1])).backward()
    train(model, optimizer, steps)
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, optimizer)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_bad_id_that_is_over_explains_no_later_failure(steps: int) -> None:
    outcomes = outcomes_of(die_after_a_bad_id, 2, steps)
    assert isinstance(outcomes[0].error, WorkerLostError), errors(outcomes)
    assert "worker 1 ended or cannot be reached" in str(outcomes[0].error)


def different(what: str) -> None:
    import parallax

    mine = int(os.environ["RANK"])
    model = Net()
    if what == "buffer":
        model.register_buffer("noise", torch.zeros(3 + mine))
    lr = 0.1 + (mine if what == "lr" else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    routes = {"table.*": "all-reduce"} if what == "routes" and mine else {}
    parallax.parallelize(model, optimizer, timeout_seconds=SECONDS, routes=routes)


@pytest.mark.parametrize(
    ("what", "says"),
    [("buffer", "buffer 'noise' (4,)"), ("lr", "lr=1.1"), ("routes", "'table.weight' (30, 4)")],
)
def test_other_differences_are_found_at_the_start(what: str, says: str) -> None:
    for outcome in outcomes_of(different, 2, what):
        assert isinstance(outcome.error, MismatchError)
        assert says in str(outcome.error)


def fail_inside_a_wait(what: str) -> None:
    """Worker 1 runs out of memory, or meets a bug, while it takes part in a lookup."""
    import torch.distributed as dist

    model, optimizer, session = start()
    train(model, optimizer)
    if session.rank == 1:
        exchange = dist.all_to_all_single

        def failing(*args: object, **options: object) -> object:
            if what == "memory":
                torch.empty(1 << 50)  # The error of the CPU's own allocator.
            if what == "GPU memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if what == "bug":
                torch.zeros(2) @ torch.zeros(3)
            return Failing(exchange(*args, **options))

        dist.all_to_all_single = failing
    train(model, optimizer)


class Failing:
    """An operation that finds, when it is waited for, that there is no memory."""

    def __init__(self, work: object) -> None:
        self.work = work

    def wait(self) -> None:
        torch.empty(1 << 50)


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("memory", RuntimeError, "can't allocate memory"),
        ("memory in a wait", RuntimeError, "can't allocate memory"),
        ("GPU memory", torch.OutOfMemoryError, "CUDA out of memory"),
        ("bug", RuntimeError, "size"),
    ],
)
def test_what_no_peer_caused_stays_what_it_is(what: str, kind: type, says: str) -> None:
    outcomes = outcomes_of(fail_inside_a_wait, 2, what)
    assert type(outcomes[1].error) is kind, errors(outcomes)
    assert says in str(outcomes[1].error)
    assert isinstance(outcomes[0].error, PeerError), errors(outcomes)
    records = [failure.from_exception(o.rank, o.error, None) for o in outcomes]  # type: ignore[arg-type]
    assert [record.rank for record in failure.in_order(records, [])] == [1, 0]
