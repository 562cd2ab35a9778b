"""Gradients of rows in parts: the same result whatever their number, also while it is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from parallax.observability.journal import read
from tests.support.workers import run_on_hosts

ROWS, BATCH, STEPS = 60, 12, 190
"""Steps: for what comes before the trials, and those of five numbers."""


class Net(nn.Module):
    """Tables of two families."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4)
        self.tags = nn.Embedding(ROWS // 2, 4)
        self.marks = nn.Embedding(ROWS, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids) + self.tags(ids // 2)
        return found.square().sum(1).mean() + self.marks(ids).pow(2).sum(1).mean()


def train_on_links(folder: str, rate: float) -> list[int]:
    """The same, where links between hosts were measured to have a rate."""
    from parallax.planning import adaptive_plan
    from parallax.planning.cost import Cluster, Link

    adaptive_plan.links.measure = lambda *_: Cluster(2, 1, Link(rate, 1e-4), Link(1e9, 1e-5))
    return train(folder, BATCH // 2, {})[1]


def train(folder: str | None, batch_size: int, options: dict[str, Any]) -> tuple[Any, list[int]]:
    """The state, and in how many parts the push of each step went."""
    import parallax

    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    # Forced routes, or these tables would become dense.
    routes = {"*": "sharded"}
    session = parallax.parallelize(model, optimizer, run_dir=folder, routes=routes, **options)
    num_steps = 10 if "replan" in options else STEPS
    generator = torch.Generator().manual_seed(1)
    data: Any = torch.randint(ROWS, (num_steps * BATCH,), generator=generator)
    numbers = []
    for batch in session.shard(DataLoader(data, batch_size)):
        numbers.append(session._training.adaptive_plan.num_partitions)
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    numbers.append(session.plan.num_partitions)
    state = session.state_dict()
    session.close()
    return state, numbers


def train_with_a_slower_worker(folder: str, batch_size: int) -> tuple[Any, list[int]]:
    """The last worker becomes slower once the number of parts is found."""
    import time

    import parallax

    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    options = {"run_dir": folder, "routes": {"*": "sharded"}}
    session = parallax.parallelize(model, optimizer, **options)
    generator = torch.Generator().manual_seed(1)
    data: Any = torch.randint(ROWS, (390 * BATCH,), generator=generator)
    numbers = []
    for step, batch in enumerate(session.shard(DataLoader(data, batch_size))):
        numbers.append(session._training.adaptive_plan.num_partitions)
        optimizer.zero_grad()
        model(batch).backward()
        if session.num_workers > 1:  # Looks are after 105 and 205 steps.
            is_slow = step > 105 and session.rank == session.num_workers - 1
            time.sleep(0.03 if is_slow else 0.006)
        optimizer.step()
    state = session.state_dict()
    session.close()
    return state, numbers


def test_the_number_is_looked_for_again_when_a_worker_becomes_slower(tmp_path: Path) -> None:
    expected, _ = train_with_a_slower_worker(str(tmp_path / "alone"), BATCH)
    folder = str(tmp_path / "two")
    run_on_hosts(train, (2,), folder, BATCH // 2, {})  # It keeps a number, of workers alike.
    found = run_on_hosts(train_with_a_slower_worker, (2,), folder, BATCH // 2)
    for name, value in expected.items():
        torch.testing.assert_close(found[0][0][name], value, rtol=1e-10, atol=1e-10)
    assert found[0][1] == found[1][1]
    assert len(set(found[0][1][206:])) > 1
    events = read(folder)
    told = [event["why"] for event in events if event["kind"] == "note"]
    assert any(why.startswith("worker 1 computes") for why in told)
    assert sum(event["kind"] == "partitions" for event in events) == 1


FIXED = {"min_partitions": 3, "replan": False}
MANY = {"min_partitions": 12, "replan": False}  # More than an owner has rows.
LEAST = {"min_partitions": 3}


@pytest.mark.parametrize(
    ("hosts", "options"), [((3,), {}), ((2, 1), LEAST), ((3,), MANY), ((2, 1), FIXED)]
)
def test_the_result_is_that_of_one_process(
    hosts: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    expected, _ = train(None, BATCH, options)
    found = run_on_hosts(train, hosts, str(tmp_path), BATCH // 3, options)
    for name, value in expected.items():
        torch.testing.assert_close(found[0][0][name], value, rtol=1e-10, atol=1e-10)
    assert all(numbers == found[0][1] for _, numbers in found)  # The same plan on all workers.
    assert min(found[0][1]) == options.get("min_partitions", 1)
    assert (len(set(found[0][1])) > 2) == (options.get("replan") is None)
    events = [event for event in read(tmp_path) if event["kind"] == "partitions"]
    assert [event["number"] for event in events] == ([found[0][1][-1]] if len(options) < 2 else [])


def test_what_was_found_is_kept_in_the_run_s_folder(tmp_path: Path) -> None:
    first = run_on_hosts(train, (2,), str(tmp_path), BATCH // 2, {})[0][1]
    again = run_on_hosts(train, (2,), str(tmp_path), BATCH // 2, {})[0][1]
    assert again == [1] * 30 + [first[-1]] * (len(again) - 30)
    events = read(tmp_path)
    assert len([event for event in events if event["kind"] == "partitions"]) == 1
    assert "as an earlier run found" in str(events) or first[-1] == 1
    # Of another cluster, or another minimum, it says nothing.
    run_on_hosts(train, (1, 1), str(tmp_path), BATCH // 2, {})
    run_on_hosts(train, (2,), str(tmp_path), BATCH // 2, {"min_partitions": 2})
    assert len([event for event in read(tmp_path) if event["kind"] == "partitions"]) == 3


def test_of_other_links_it_says_nothing(tmp_path: Path) -> None:
    for rate, number in ((1e8, 1), (1.2e8, 1), (3e8, 2)):
        run_on_hosts(train_on_links, (1, 1), str(tmp_path), rate)
        events = [event for event in read(tmp_path) if event["kind"] == "partitions"]
        assert len(events) == number
