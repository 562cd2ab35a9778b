"""Rows one batch ahead: the same result as one process, whatever the batches and the script do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.workers import run_workers

ROWS, SAMPLES, BATCH = 60, 52, 12
FOREVER = 10**6


class Net(nn.Module):
    """Two tables; the first is looked up with a slice of the batch, and twice."""

    def __init__(self, twist: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4)
        self.tags = nn.Embedding(ROWS, 3)
        self.out = nn.Linear(7, 1)
        self.twist = twist

    def forward(self, windows: Tensor, tags: Tensor, marks: Tensor) -> Tensor:
        words = windows[:, :-1]
        if self.twist is not None:
            words = self.twist(words, marks)
        found = self.words(words).mean(1) + self.words(windows[:, 1:]).mean(1)
        return self.out(torch.cat([found, self.tags(tags)], 1)).square().mean()


class Samples(Dataset[tuple[Tensor, ...]]):
    """`spread` is how many rows the ids of a sample may be away from those of the one before."""

    def __init__(self, spread: int, marked: tuple[int, ...] = (), draws: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        first = torch.arange(SAMPLES)[:, None] * 7
        drift = torch.randint(spread, (SAMPLES, 6), generator=generator)
        self.windows = (first + drift) % ROWS
        self.tags = torch.randint(spread, (SAMPLES,), generator=generator) % ROWS
        self.marks = torch.tensor([i in marked for i in range(SAMPLES)])
        self.draws = draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if self.draws:
            torch.rand(())
        return self.windows[index], self.tags[index], self.marks[index]


def shift_marked(words: Tensor, marks: Tensor) -> Tensor:
    return torch.where(marks[:, None], (words + 1) % ROWS, words)


def count_headers(session: Any) -> Callable[[], int]:
    """How many headers this worker has sent."""
    sent = [0]
    peers = session._peers
    swapped = peers._swapped

    def counted(headers: Tensor) -> Tensor:
        sent[0] += 1
        found: Tensor = swapped(headers)
        return found

    peers._swapped = counted
    return lambda: sent[0]


def train(
    spread: int = ROWS,
    marked: tuple[int, ...] = (),
    made_inside: bool = False,
    accumulate: int = 1,
    leave_after: int = FOREVER,
    steps_first: bool = False,
    evaluates: bool = False,
    draws: bool = False,
    assigns: bool = False,
    optimizer_name: str = "Adagrad",
    lookahead: bool = True,
    drop_last: bool = False,
) -> tuple[dict[str, Tensor], list[int]]:
    """Three epochs of a script; gives rank 0's state and the headers of each of its steps."""
    import parallax

    torch.manual_seed(0)
    twist = None
    if marked:
        twist = shift_marked
    if made_inside:
        twist = lambda words, marks: (words * 5 + 1) % ROWS  # noqa: E731
    model = Net(twist).double()
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.1)
    options = {"routes": {"words.*": "sharded", "tags.*": "sharded"}, "lookahead": lookahead}
    session = parallax.parallelize(model, optimizer, **options)
    headers = count_headers(session)
    data = Samples(spread, marked, draws)
    loader = session.shard(DataLoader(data, BATCH, drop_last=drop_last), split=True)
    tests = session.shard(DataLoader(data, BATCH), split=True)
    counts = []
    for epoch in range(3):
        for number, batch in enumerate(loader):
            before = headers()
            if steps_first and number:
                optimizer.step()
                optimizer.zero_grad()
            if assigns and number == 2:
                with torch.no_grad():
                    model.words.weight.copy_(torch.full((ROWS, 4), 0.25 + epoch).double())
            is_last = (number + 1) % accumulate == 0
            if is_last:
                model(*batch).backward()
            else:
                with session.no_sync():
                    model(*batch).backward()
            if is_last and not steps_first:
                optimizer.step()
                optimizer.zero_grad()
            counts.append(headers() - before)
            if evaluates and number == 1:
                with torch.no_grad():
                    for held_out in tests:
                        model(*held_out)
            if number + 1 >= leave_after:
                break
    state = session.state_dict()
    session.close()
    return state, counts


def assert_same(options: dict[str, Any], num_workers: int) -> list[list[int]]:
    alone, _ = train(**options)
    results = run_workers(train_with, num_workers, options)
    for name, value in alone.items():
        torch.testing.assert_close(results[0][0][name], value, rtol=1e-10, atol=1e-10)
    return [counts for _, counts in results]


def train_with(options: dict[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
    return train(**options)


SCRIPTS: dict[str, dict[str, Any]] = {
    "every row in every step": {"spread": 3},
    "hardly a row twice": {"spread": ROWS},
    "accumulation": {"accumulate": 2},
    "ids made in forward": {"made_inside": True},
    "another epoch begins early": {"leave_after": 3},
    "the step comes first": {"steps_first": True},
    "evaluation in between": {"evaluates": True},
    "a dataset that draws": {"draws": True},
    "rows assigned": {"assigns": True},
    "plain SGD": {"optimizer_name": "SGD"},
    "only whole batches": {"drop_last": True},
    "switched off": {"lookahead": False},
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_result_is_that_of_one_process(name: str, num_workers: int) -> None:
    assert_same(SCRIPTS[name], num_workers)


@pytest.mark.parametrize("marked", [(30,), (0, 13, 26, 39), tuple(range(24, 52, 5))])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_wrong_guess_on_one_worker_is_served(marked: tuple[int, ...], accumulate: int) -> None:
    assert_same({"marked": marked, "accumulate": accumulate}, 3)


def test_foreseen_lookups_need_no_headers() -> None:
    """Three lookups and a reduction: once the tables are foreseen only the reduction has one."""
    for counts in assert_same({"drop_last": True}, 2):
        assert counts[0] == 4
        assert counts[3:] == [1] * len(counts[3:])
    for counts in assert_same({"drop_last": True, "lookahead": False}, 2):
        assert counts == [4] * len(counts)


def test_a_table_whose_ids_are_made_in_forward_does_not_hold_up_the_other() -> None:
    for counts in assert_same({"made_inside": True, "drop_last": True}, 2):
        assert set(counts[3:]) == {3}  # two lookups of one table, and the reduction


def batches_of(loader: DataLoader[Any]) -> Iterator[Any]:
    yield from loader
