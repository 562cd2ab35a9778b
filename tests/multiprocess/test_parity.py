"""N workers equal one process on the joined batch, over every table form, optimizer and plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import EXACT, LAZY, ROW_FORMS, WHOLE_FORMS
from tests.support.parity import Case, assert_same, train_alone, train_together
from tests.support.workers import run_workers

FORCED = {
    "all-reduce": {"routes": {"*": "all-reduce"}},
    "hybrid": {},
    "in parts": {"min_partitions": 3},
}


def check(case: Case, num_workers: int, route: str, *, lazy: bool = False) -> None:
    found, routes = zip(*run_workers(train_together, num_workers, case), strict=True)
    assert set(routes) == {route}
    assert_same(found[0], train_alone(case, lazy=lazy), case.dtype)


@pytest.mark.parametrize("form", ROW_FORMS)
@pytest.mark.filterwarnings("ignore:table .* got a whole gradient")
def test_every_kind_of_lookup_is_sharded_and_exact(form: str) -> None:
    check(Case(form, shares=(5, 7)), 2, "sharded")


@pytest.mark.parametrize("form", WHOLE_FORMS)
@pytest.mark.filterwarnings("ignore:parameter .* is used whole")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_tables_used_whole_are_dense_and_exact(form: str) -> None:
    check(Case(form, shares=(5, 4, 3)), 3, "all-reduce")


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("plan", FORCED)
@pytest.mark.parametrize("form", ["embedding", "several"])
def test_every_plan_at_two_to_four_workers(
    form: str, plan: str, dtype: torch.dtype, num_workers: int
) -> None:
    case = Case(form, options=FORCED[plan], dtype=dtype)
    check(case, num_workers, "all-reduce" if plan == "all-reduce" else "sharded")


@pytest.mark.parametrize("shares", [(12, 0), (0, 12), (1, 11), (0, 0, 12), (4, 0, 1, 7)])
@pytest.mark.parametrize("form", ["padding", "several", "tied"])
def test_uneven_batches_down_to_none(form: str, shares: tuple[int, ...]) -> None:
    route = "all-reduce" if form == "tied" else "sharded"
    check(Case(form, shares=shares), len(shares), route)


@pytest.mark.parametrize("optimizer", EXACT)
@pytest.mark.parametrize("form", ["embedding", "sparse-padding"])
def test_exact_optimizers_shard_by_default(form: str, optimizer: str) -> None:
    check(Case(form, optimizer, shares=(5, 4, 3)), 3, "sharded")


@pytest.mark.parametrize("optimizer", LAZY)
def test_other_optimizers_shard_when_lazy(optimizer: str) -> None:
    case = Case("pretrained-padding", optimizer, {"lazy": True}, shares=(5, 4, 3))
    check(case, 3, "sharded", lazy=True)


def test_lazy_means_the_same_with_one_process() -> None:
    case = Case("padding", "adam", {"lazy": ["table.*"]})
    found, route = train_together(case)
    assert route == "sharded"
    assert_same(found, train_alone(case, lazy=True), case.dtype)


@pytest.mark.parametrize("form", ["sparse", "sparse-padding", "bag-sparse"])
def test_sparse_adam(form: str) -> None:
    check(Case(form, "sparseadam", shares=(5, 0, 7)), 3, "sharded")


def test_momentum_with_sparse_gradients_is_dense_mathematics_in_torch_and_here() -> None:
    check(Case("sparse", "sgd-momentum", shares=(5, 7)), 2, "sharded")


def test_frozen_tables_are_exact() -> None:
    check(Case("frozen", shares=(5, 7)), 2, "frozen")


def test_frozen_tables_can_be_sharded_for_their_memory() -> None:
    options = {"routes": {"table.weight": "sharded"}}
    check(Case("frozen", options=options, shares=(5, 7)), 2, "sharded")


@pytest.mark.parametrize("num_workers", [2, 3, 5])
@pytest.mark.parametrize("bucket_megabytes", [None, 1.2])
def test_large_and_small_dense_gradients(bucket_megabytes: float | None, num_workers: int) -> None:
    """Those of one megabyte at most take another way. See [Note: direct]."""
    found = run_workers(_train_wide, num_workers, bucket_megabytes)
    alone = _train_wide(bucket_megabytes)
    for state in found:
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(state[name], found[0][name])


def test_dense_gradients_travel_while_the_backward_goes_on() -> None:
    for events in run_workers(_events_of_a_backward, 2):
        assert events == ["all-reduce", "first layer", "all-reduce"]


def _train_wide(bucket_megabytes: float | None) -> dict[str, torch.Tensor]:
    with _wide(bucket_megabytes) as (model, step):
        for _ in range(3):
            step()
        return dict(model.state_dict())


def _events_of_a_backward() -> list[str]:
    events: list[str] = []
    all_reduce = dist.all_reduce

    def seen(*arguments: Any, **options: Any) -> Any:
        events.append("all-reduce")
        return all_reduce(*arguments, **options)

    with _wide(None) as (model, step):
        step()  # Shows the order of the gradients.
        step()  # Has the buckets anew.
        model[0].weight.register_hook(lambda gradient: events.append("first layer"))
        with patch.object(dist, "all_reduce", seen):
            step()
    return events


@contextmanager
def _wide(
    bucket_megabytes: float | None,
) -> Iterator[tuple[nn.Sequential, Callable[[], None]]]:
    """A model, and a step of its training."""
    import parallax

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 600), nn.Linear(600, 600), nn.Linear(600, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, bucket_megabytes=bucket_megabytes)
    rows = torch.arange(session.rank, 60, session.num_workers)
    batch = torch.randn(60, 7)[rows]

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    yield model, step
    session.close()
