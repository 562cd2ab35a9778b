"""What a step may cost, counted on two workers: calls, operations and host synchronisations.

`pytest tests/multiprocess/test_budget.py -s` shows the figures, with plain torch beside them. See
tests/support/budget.py for what counts.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

from tests.support.budget import (
    CallCounter,
    Calls,
    OperationCounter,
    Operations,
    calls_of,
    operations_of,
)
from tests.support.workers import run_workers

MAX_OWN_CALLS = 300  # of a step with any number of tables, lookups aside
MAX_CALLS_PER_TABLE = 80
MAX_OPERATIONS_PER_TABLE = 18
MAX_SYNCHRONISATIONS = 3  # of a step with any number of tables
NUM_TABLES = (2, 10, 26)


class Costs(NamedTuple):
    """What a step costs by the number of tables, on the worker where it is most."""

    calls: dict[int, Calls]
    operations: dict[int, Operations]

    @property
    def own_calls(self) -> dict[int, float]:
        return {num_tables: calls.own for num_tables, calls in self.calls.items()}

    @property
    def all_calls(self) -> dict[int, float]:
        return {num_tables: calls.all for num_tables, calls in self.calls.items()}

    @property
    def num_operations(self) -> dict[int, float]:
        return {num_tables: each.operations for num_tables, each in self.operations.items()}

    @property
    def synchronisations(self) -> dict[int, float]:
        return {n: each.num_synchronisations for n, each in self.operations.items()}


def per_table(counts: dict[int, float]) -> float:
    """What one more table adds, at most."""
    few, some, many = NUM_TABLES
    return max(
        (counts[some] - counts[few]) / (some - few),
        (counts[many] - counts[some]) / (many - some),
    )


def without_tables(counts: dict[int, float]) -> float:
    """What a step would cost without any table, by the line through the ends."""
    few, _, many = NUM_TABLES
    return counts[few] - few * (counts[many] - counts[few]) / (many - few)


def costs_of(engine: str, num_workers: int) -> Costs:
    calls, operations = {}, {}
    for num_tables in NUM_TABLES:
        found = run_workers(calls_of, num_workers, num_tables, engine)
        calls[num_tables] = max(found, key=lambda each: each.all)
        found = run_workers(operations_of, num_workers, num_tables, engine)
        operations[num_tables] = max(found, key=lambda each: each.num_synchronisations)
    costs = Costs(calls, operations)
    show(engine, costs)
    return costs


def show(engine: str, costs: Costs) -> None:
    print(f"\n{engine}: a step with {', '.join(map(str, NUM_TABLES))} tables")
    for name, counts in (
        ("own calls, lookups aside", costs.own_calls),
        ("all calls", costs.all_calls),
        ("operations", costs.num_operations),
        ("synchronisations", costs.synchronisations),
    ):
        figures = ", ".join(f"{count:,.0f}" for count in counts.values())
        print(
            f"  {name}: {figures}; {per_table(counts):,.1f} a table, "
            f"{without_tables(counts):,.0f} without any"
        )
    for num_tables, each in costs.operations.items():
        print(f"  synchronisations with {num_tables} tables: {each.synchronisations}")


@pytest.fixture(scope="module")
def plain() -> Costs:
    return costs_of("plain", 1)


@pytest.fixture(scope="module")
def ours() -> Costs:
    return costs_of("parallax", 2)


@pytest.mark.xfail(strict=True, reason="411 calls and 4 for each table; see docs/decisions.md")
def test_own_calls_of_a_step(ours: Costs) -> None:
    assert max(ours.own_calls.values()) <= MAX_OWN_CALLS


def test_own_calls_do_not_grow(ours: Costs) -> None:
    """What there was when the goal was missed; lower it when there is less."""
    assert without_tables(ours.own_calls) <= 420
    assert per_table(ours.own_calls) <= 4


def test_calls_that_a_table_adds(ours: Costs) -> None:
    assert per_table(ours.all_calls) <= MAX_CALLS_PER_TABLE


def test_operations_that_a_table_adds(ours: Costs) -> None:
    assert per_table(ours.num_operations) <= MAX_OPERATIONS_PER_TABLE


def test_host_synchronisations_of_a_step(ours: Costs) -> None:
    assert max(ours.synchronisations.values()) <= MAX_SYNCHRONISATIONS


def test_a_table_adds_no_host_synchronisation(ours: Costs) -> None:
    assert per_table(ours.synchronisations) == 0


def test_all_that_is_counted_is_seen(plain: Costs, ours: Costs) -> None:
    """A counter that sees nothing would find every budget kept."""
    for num_tables in NUM_TABLES:
        calls, reference = ours.calls[num_tables], plain.calls[num_tables]
        assert reference.own == reference.own_in_lookups == 0
        assert calls.own > 0
        assert calls.own_in_lookups >= num_tables
        assert 0 < calls.own + calls.own_in_lookups < calls.python
        assert min(reference.python, reference.builtin, calls.builtin) > num_tables
        assert plain.operations[num_tables].operations > num_tables
        assert plain.operations[num_tables].num_synchronisations == 0
        assert ours.operations[num_tables].operations > num_tables


class Answering(torch.Tensor):
    """A tensor that synchronises as it answers a lookup; torch has the function mode off then."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return torch.arange(2).tolist()


def synchronise() -> None:
    values = torch.arange(3)
    values.tolist(), values.cpu(), values.nonzero(), values.unique(), values.equal(values)
    int(values[1]), values[values > 1], values[values], values.sum()
    torch.nn.functional.embedding(values, torch.zeros(3, 1).as_subclass(Answering))


def on_all_threads(stranger: ThreadPoolExecutor) -> None:
    """Synchronise here, on a new thread, and in a callback on a thread older than the counters."""
    synchronise()
    thread = threading.Thread(target=synchronise)
    thread.start()
    thread.join()
    future: torch.futures.Future[None] = torch.futures.Future()
    done = future.then(lambda _: synchronise())
    stranger.submit(future.set_result, None).result()
    done.wait()


def older_thread() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    return pool


def counted_operations() -> Operations:
    stranger, counter = older_thread(), OperationCounter()
    counter.install()
    with counter.modes():
        counter.is_on = True
        on_all_threads(stranger)
        optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(1))])
        optimizer.register_step_post_hook(lambda *_: torch.arange(3).tolist())
        optimizer.step(lambda: float(torch.ones(1)))
        counter.is_on = False
    counter.steps.next()
    return Operations(0, {kind: counter.steps.median(kind) for kind in counter.steps.kinds()})


def test_host_synchronisations_count_on_all_threads_but_not_in_the_optimizer() -> None:
    (found,) = run_workers(counted_operations, 1)
    assert found.synchronisations.pop("operations") > 21
    assert found.synchronisations == {
        "tolist": 3 * 2 + 1,
        **dict.fromkeys(("cpu", "nonzero", "unique", "equal", "item", "mask"), 3),
    }


def counted_calls() -> Calls:
    stranger, counter = older_thread(), CallCounter()
    counter.install()
    counter.is_on = True
    on_all_threads(stranger)
    counter.is_on = False
    counter.remove()
    counter.steps.next()
    assert sys.getprofile() is None
    return Calls(*(counter.steps.median(kind) for kind in Calls._fields))


def test_calls_count_on_all_threads() -> None:
    (found,) = run_workers(counted_calls, 1)
    assert found.builtin > 3 * 9
    assert (found.own, found.own_in_lookups) == (0, 0)
