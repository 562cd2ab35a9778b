"""N workers in one process: built side by side, then iterated in turn, worker 0 first."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from parallax.data import ShardedLoader, count, empty, take
from parallax.data.splitting import apportion
from parallax.errors import CheckpointError, ConfigError, MismatchError


class Board:
    """What the workers tell each other: integers in turn, and all that worker 0 broadcast."""

    def __init__(self, num_workers: int) -> None:
        self.barrier = threading.Barrier(num_workers, timeout=20)
        self.told = [0] * num_workers
        self.broadcasts: list[Tensor] = []


class Member:
    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.num_workers = board, rank, len(board.told)
        self.num_heard = 0

    def gather_ints(self, value: int) -> list[int]:
        self.board.told[self.rank] = value
        self.board.barrier.wait()
        told = list(self.board.told)
        self.board.barrier.wait()
        return told

    def broadcast_ints(self, values: Tensor | None) -> Tensor:
        assert (values is not None) == (self.rank == 0)
        if values is not None:
            assert values.dtype == torch.int64
            assert values.dim() == 1
            self.board.broadcasts.append(values.clone())
        self.num_heard += 1
        return self.board.broadcasts[self.num_heard - 1].clone()


@dataclass
class Worker:
    rank: int
    sharded: ShardedLoader
    counts: list[list[int]] = field(default_factory=list)
    batches: Iterator[Any] | None = None

    def run(self, num_steps: int | None = None) -> list[Any]:
        """A new epoch, or its first steps; the iteration can be gone on with."""
        self.counts.clear()
        self.batches = iter(self.sharded)
        return list(islice(self.batches, num_steps))


class Counting:
    """Trains nothing; keeps the numbers of samples that come before each batch."""

    def __init__(self, counts: list[Any]) -> None:
        self.counts = counts

    def prefetches_here(self) -> bool:
        return False

    def reads_ahead(self, loader: int) -> bool:
        return False

    def declare_random(self, loader: int) -> None: ...

    def declare_ids(self, loader: int, ids: dict[str, Callable[[Any], Any]]) -> None: ...

    def begin_batch(self, of: Any, batch: Any, following: Any, counts: list[int]) -> None:
        self.counts.append(counts)

    def end_data(self) -> None: ...


class Job:
    def __init__(
        self, num_workers: int, make: Callable[[int], DataLoader[Any]], split: bool = False
    ) -> None:
        board = Board(num_workers)

        def build(rank: int) -> Worker:
            counts: list[list[int]] = []
            member = Member(board, rank)
            sharded = ShardedLoader(make(rank), member, split=split, consumer=Counting(counts))
            return Worker(rank, sharded, counts)

        with ThreadPoolExecutor(num_workers) as pool:
            futures = [pool.submit(build, rank) for rank in range(num_workers)]
        errors = [future.exception() for future in futures]
        # Not the broken barrier that the others see.
        if error := min(filter(None, errors), key=lambda e: e.args == (), default=None):
            raise error
        self.workers = [future.result() for future in futures]

    def run(self, num_steps: int | None = None) -> list[list[Any]]:
        """Every worker's batches; RNGs other than worker 0's are told apart by their seed."""
        seen = [self.workers[0].run(num_steps)]
        state = torch.get_rng_state()
        for worker in self.workers[1:]:
            torch.manual_seed(1000 + worker.rank)
            seen.append(worker.run(num_steps))
        torch.set_rng_state(state)
        self.check_counts(seen)
        return seen

    def check_counts(self, seen: list[list[Any]]) -> None:
        told = [worker.counts for worker in self.workers]
        assert all(counts == told[0] for counts in told)
        assert len({len(batches) for batches in seen}) == 1
        actual = [[len(samples(batch)) for batch in batches] for batches in seen]
        assert [list(step) for step in zip(*actual, strict=True)] == told[0]

    def state(self) -> dict[str, Any]:
        states = [worker.sharded.state_dict() for worker in self.workers]
        for state in states[1:]:
            assert state.keys() == states[0].keys()
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[0][key])), key
        return states[0]

    def load(self, state: dict[str, Any]) -> Job:
        for worker in self.workers:
            worker.sharded.load_state_dict(state)
        return self


def samples(batch: Any) -> list[int]:
    """The sample numbers in a batch of any of the collates below."""
    if isinstance(batch, Tensor):
        return batch.flatten(1)[:, 0].tolist() if batch.dim() > 1 else batch.tolist()
    if isinstance(batch, dict):
        return samples(batch["id"])
    if isinstance(batch, tuple):
        return samples(batch[0])
    return [int(x[0]) if isinstance(x, Tensor) else int(x) for x in batch]


def flat(seen: list[list[Any]]) -> list[int]:
    """All samples in the order of the steps, and of the ranks within."""
    return [x for step in zip(*seen, strict=True) for batch in step for x in samples(batch)]


def numbers(n: int) -> TensorDataset:
    return Numbers(torch.arange(n))


class Numbers(TensorDataset):
    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[0][index]


class Stream(IterableDataset[Tensor]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        start, stride = (info.id, info.num_workers) if info else (0, 1)
        return (torch.tensor(i) for i in range(start, self.n, stride))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


WORKERS = [1, 2, 3, 4, 5]
SIZES = [1, 2, 7, 12, 23, 40]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_every_sample_once(num_workers: int, size: int, shuffle: bool, split: bool) -> None:
    job = Job(num_workers, lambda _: DataLoader(numbers(size), 4, shuffle=shuffle), split)
    epochs = [job.run() for _ in range(2)]
    for seen in epochs:
        assert sorted(flat(seen)) == list(range(size))
        assert len(seen[0]) == len(job.workers[0].sharded)
        assert all(len(batch) > 0 for batch in seen[0])
    if shuffle and size > 10:
        assert flat(epochs[0]) != flat(epochs[1])


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("split", [False, True])
def test_drop_last_drops_the_incomplete_step(num_workers: int, size: int, split: bool) -> None:
    job = Job(num_workers, lambda _: DataLoader(numbers(size), 3, drop_last=True), split)
    seen, whole = job.run(), 3 if split else 3 * num_workers
    assert flat(seen) == list(range(size // whole * whole))
    assert len(seen[0]) == len(job.workers[0].sharded) == size // whole


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_order_and_draws_are_a_plain_loaders(
    num_workers: int, own_generator: bool, loader_workers: int, drop_last: bool
) -> None:
    def make(rank: int, seed: int = 5) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed + rank) if own_generator else None
        return DataLoader(
            numbers(24),
            4,
            shuffle=True,
            drop_last=drop_last,
            num_workers=loader_workers,
            generator=generator,
        )

    torch.manual_seed(11)
    plain = make(0)
    expected = [[x for batch in plain for x in batch.tolist()] for _ in range(3)]
    expected_rng = torch.rand(3)

    job = Job(num_workers, make)
    torch.manual_seed(11)
    assert [flat(job.run()) for _ in range(3)] == expected
    assert torch.equal(torch.rand(3), expected_rng)


def test_one_worker_is_the_loader_itself() -> None:
    for kwargs in [{"shuffle": True}, {"sampler": WeightedRandomSampler([1.0, 2, 3] * 5, 9)}]:
        loader = DataLoader(numbers(15), 4, **kwargs)
        job = Job(1, lambda _, loader=loader: loader)
        torch.manual_seed(3)
        plain = [batch.tolist() for _ in range(2) for batch in loader]
        rng = torch.rand(2)
        torch.manual_seed(3)
        assert [batch.tolist() for _ in range(2) for batch in job.run()[0]] == plain
        assert torch.equal(torch.rand(2), rng)


def test_workers_with_different_batch_sizes() -> None:
    sizes = [2, 5, 3]
    job = Job(3, lambda rank: DataLoader(numbers(37), sizes[rank], shuffle=True))
    seen = job.run()
    assert sorted(flat(seen)) == list(range(37))
    assert job.workers[0].counts == [sizes] * 3 + [[1, 4, 2]]
    assert len(job.workers[0].sharded) == 4


def test_spread() -> None:
    assert apportion(10, [2, 5, 3]) == [2, 5, 3]
    assert apportion(3, [4, 4, 4, 4]) == [1, 1, 1, 0]
    assert apportion(7, [1, 1, 1]) == [3, 2, 2]
    assert apportion(2, [8, 1, 8]) == [1, 0, 1]
    assert apportion(3, [1, 8]) == [1, 2]  # worker 0 never has nothing
    assert apportion(0, [1, 8]) == [0, 0]
    for total in range(40):
        assert sum(apportion(total, [3, 30, 7])) == total
        assert all(a <= b for a, b in zip(apportion(total, [3, 30, 7]), [3, 30, 7], strict=True))


def test_split_keeps_the_global_batches_of_one_process() -> None:
    plain = [batch.tolist() for batch in DataLoader(numbers(11), 5)]
    seen = Job(3, lambda _: DataLoader(numbers(11), 5), split=True).run()
    steps = [[x for part in step for x in part.tolist()] for step in zip(*seen, strict=True)]
    assert steps == plain
    assert [[len(part) for part in step] for step in zip(*seen, strict=True)] == [
        [2, 2, 1],
        [2, 2, 1],
        [1, 0, 0],
    ]


def test_split_of_batches_smaller_than_the_workers() -> None:
    seen = Job(4, lambda _: DataLoader(numbers(5), 2, shuffle=True), split=True).run()
    assert sorted(flat(seen)) == list(range(5))
    assert [len(batch) for batch in seen[3]] == [0, 0, 0]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (lambda: SubsetRandomSampler(range(3, 20)), range(3, 20)),
        (lambda: [9, 1, 1, 4, 7], [1, 1, 4, 7, 9]),
        (lambda: list(np.array([5, 2, 8])), [2, 5, 8]),
        (lambda: RandomSampler(range(21), num_samples=30), None),
    ],
)
def test_other_samplers(num_workers: int, split: bool, sampler: Any, expected: Any) -> None:
    job = Job(num_workers, lambda _: DataLoader(numbers(21), 3, sampler=sampler()), split)
    seen = job.run()
    if expected is not None:
        assert sorted(flat(seen)) == sorted(expected)
    assert len(flat(seen)) == len(sampler())
    assert len(seen[0]) == len(job.workers[0].sharded)


class Buckets:
    """Batches of different lengths, in a new order each epoch."""

    def __init__(self, bounds: list[int]) -> None:
        self.bounds = bounds

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[list[int]]:
        for i in torch.randperm(len(self)).tolist():
            yield list(range(self.bounds[i], self.bounds[i + 1]))


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("split", [False, True])
def test_batch_sampler(num_workers: int, split: bool) -> None:
    bounds = [0, 3, 4, 9, 11, 15, 21, 22]
    job = Job(num_workers, lambda _: DataLoader(numbers(22), batch_sampler=Buckets(bounds)), split)
    for _ in range(2):
        seen = job.run()
        assert sorted(flat(seen)) == list(range(22))
        assert len(seen[0]) == len(job.workers[0].sharded)
        if not split:
            batches = {tuple(batch.tolist()) for part in seen for batch in part if len(batch)}
            assert batches == {tuple(range(a, b)) for a, b in pairwise(bounds)}


def test_stock_batch_sampler_counts_as_batch_size() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 2, drop_last=True)
    job = Job(2, lambda _: DataLoader(numbers(10), batch_sampler=batches))
    assert [[b.tolist() for b in part] for part in job.run()] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("size", [1, 7, 23])
@pytest.mark.parametrize("split", [False, True])
def test_iterable(num_workers: int, size: int, split: bool) -> None:
    job = Job(num_workers, lambda _: DataLoader(SizedStream(size), 4), split)
    seen = job.run()
    assert flat(seen) == list(range(size))
    assert len(seen[0]) == len(job.workers[0].sharded)
    assert flat(job.run()) == list(range(size))


def test_iterable_drop_last_drops_the_incomplete_group() -> None:
    job = Job(3, lambda _: DataLoader(SizedStream(19), 2, drop_last=True))
    assert flat(job.run()) == list(range(18))
    assert len(job.workers[0].sharded) == 3
    job = Job(2, lambda _: DataLoader(SizedStream(11), 2, drop_last=True))
    assert flat(job.run()) == list(range(8))
    assert len(job.workers[0].sharded) == 2


def test_iterable_without_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(Job(2, lambda _: DataLoader(Stream(9), 2)).workers[0].sharded)


class ShuffledStream(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randperm(self.n)


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_random_stream_is_the_same_on_every_worker(loader_workers: int) -> None:
    job = Job(3, lambda _: DataLoader(ShuffledStream(20), 3, num_workers=loader_workers))
    epochs = [flat(job.run()) for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
    assert epochs[0] != epochs[1]


def test_a_shared_stream_leaves_each_worker_its_own_randomness() -> None:
    job = Job(2, lambda _: DataLoader(ShuffledStream(20), 3))
    job.workers[0].run()
    torch.manual_seed(9)
    own = torch.get_rng_state()
    job.workers[1].run()
    assert torch.equal(torch.get_rng_state(), own)


class Unsized:
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10).tolist())


@pytest.mark.parametrize("split", [False, True])
def test_sampler_without_length_is_read_as_a_stream(split: bool) -> None:
    seen = Job(3, lambda _: DataLoader(numbers(10), 2, sampler=Unsized()), split).run()
    assert sorted(flat(seen)) == list(range(10))


class Prebatched(Dataset[Tensor]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(index * 10, index * 10 + index + 1)


@pytest.mark.parametrize("split", [False, True])
def test_loader_without_batching(split: bool) -> None:
    expected = [x for i in range(5) for x in range(i * 10, i * 10 + i + 1)]
    make = lambda _: DataLoader(Prebatched(), batch_size=None, shuffle=True)  # noqa: E731
    assert sorted(flat(Job(3, make, split).run())) == expected


class Doubled(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (batch * 2 for batch in super().__iter__())


def test_loader_with_an_iteration_of_its_own_is_read_as_a_stream() -> None:
    assert flat(Job(2, lambda _: Doubled(numbers(7), 2)).run()) == list(range(0, 14, 2))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_loader_workers(persistent: bool, stream: bool) -> None:
    dataset: Any = Stream(13) if stream else numbers(13)
    job = Job(2, lambda _: DataLoader(dataset, 3, num_workers=2, persistent_workers=persistent))
    for _ in range(2):
        assert sorted(flat(job.run())) == list(range(13))


def as_tuple(batch: list[Tensor]) -> Any:
    ids = torch.stack(batch)
    return ids, torch.stack([ids, ids], 1).float()


def as_bags(batch: list[Tensor]) -> Any:
    offsets = torch.arange(len(batch)) * 3
    return torch.stack(batch), torch.zeros(3 * len(batch)), offsets


Pair = namedtuple("Pair", ["id", "name"])
COLLATES: dict[str, Callable[[list[Tensor]], Any]] = {
    "tensor": torch.stack,
    "tuple": as_tuple,
    "dict": lambda batch: {"id": torch.stack(batch), "name": [str(int(x)) for x in batch]},
    "strings": lambda batch: [str(int(x)) for x in batch],
    "ragged": lambda batch: [torch.full((1 + int(x) % 4,), int(x)) for x in batch],
    "nested": lambda batch: {"id": (torch.stack(batch), [{"n": torch.stack(batch)}]), "scale": 2.0},
    "namedtuple": lambda batch: Pair(torch.stack(batch), [str(int(x)) for x in batch]),
    "bags": as_bags,
    "arrays": lambda batch: (torch.stack(batch), np.stack([x.numpy() for x in batch])),
}


@pytest.mark.parametrize("collate", COLLATES)
@pytest.mark.parametrize("stream", [False, True])
def test_collates(collate: str, stream: bool) -> None:
    dataset: Any = Stream(13) if stream else numbers(13)
    job = Job(3, lambda _: DataLoader(dataset, 3, collate_fn=COLLATES[collate]))
    seen = job.run()  # 13 = 9 + 4 for samples, 3 + 2 batches for a stream: the last worker lacks
    assert flat(seen) == list(range(13))
    if stream:
        assert job.workers[0].counts == [[3, 3, 3], [3, 1, 0]]


@pytest.mark.parametrize("collate", COLLATES)
def test_a_worker_that_never_has_a_sample(collate: str) -> None:
    job = Job(4, lambda _: DataLoader(numbers(2), 3, collate_fn=COLLATES[collate]))
    seen = job.run()
    assert job.workers[0].counts == [[1, 1, 0, 0]]
    assert type(seen[3][0]) is type(seen[0][0])
    if collate in ("strings", "ragged"):
        assert seen[3][0] == []
    if collate == "tuple":
        assert seen[3][0][1].shape == (0, 2)
    if collate == "bags":
        assert [len(field) for field in seen[3][0]] == [0, 0, 0]
    if collate == "nested":
        assert seen[3][0]["scale"] == 2.0
        assert seen[3][0]["id"][1][0]["n"].shape == (0,)


@pytest.mark.parametrize("collate", sorted(set(COLLATES) - {"bags"}))
def test_split_of_a_stream_slices_any_batch(collate: str) -> None:
    make = lambda _: DataLoader(Stream(13), 5, collate_fn=COLLATES[collate])  # noqa: E731
    assert flat(Job(3, make, split=True).run()) == list(range(13))


def test_split_of_a_stream_refuses_rows_of_no_sample() -> None:
    job = Job(2, lambda _: DataLoader(Stream(8), 4, collate_fn=as_bags), split=True)
    with pytest.raises(ConfigError, match=r"4 samples .* shape \(12,\)"):
        job.run()


class Opaque:
    def __init__(self, batch: list[Tensor]) -> None:
        self.batch = torch.stack(batch)


@pytest.mark.parametrize("stream", [False, True])
def test_opaque_batches_need_drop_last(stream: bool) -> None:
    dataset: Any = Stream(10) if stream else numbers(10)
    job = Job(3, lambda _: DataLoader(dataset, 3, collate_fn=Opaque))
    assert list(job.workers[0].run())
    with pytest.raises(ConfigError, match=r"Opaque.*drop_last=True"):
        job.workers[2].run()
    job = Job(3, lambda _: DataLoader(dataset, 3, collate_fn=Opaque, drop_last=True))
    assert [len(worker.run()) for worker in job.workers] == [1, 1, 1]


# Resume


def resumable(n: int) -> dict[str, tuple[Callable[[int], DataLoader[Any]], int]]:
    """Loaders by name, and how many samples an epoch has."""
    data = numbers(n)
    generator = torch.Generator
    bounds = [*range(0, n, 3), n]
    return {
        "sequential": (lambda _: DataLoader(data, 3), n),
        "shuffled": (lambda _: DataLoader(data, 3, shuffle=True), n),
        "generator": (lambda _: DataLoader(data, 3, shuffle=True, generator=generator()), n),
        "subset": (lambda _: DataLoader(data, 3, sampler=SubsetRandomSampler(range(n))), n),
        "batches": (lambda _: DataLoader(data, batch_sampler=Buckets(bounds)), n),
        "stream": (lambda _: DataLoader(Stream(n), 3), n),
        "shuffled stream": (lambda _: DataLoader(ShuffledStream(n), 3), n),
        "loader workers": (lambda _: DataLoader(data, 3, shuffle=True, num_workers=2), n),
    }


@pytest.mark.parametrize("name", resumable(1))
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 1), (4, 4), (3, 2)])
@pytest.mark.parametrize("split", [False, True])
def test_resume_at_another_number_of_workers(
    name: str, before: int, after: int, split: bool
) -> None:
    make, n = resumable(50)[name]
    first = Job(before, make, split)
    first.run()
    torch.manual_seed(1)
    begun = flat(first.run(num_steps=2))
    state = first.state()
    assert state["epoch"] == 1

    torch.manual_seed(77)  # the order is the state's, not the new process's
    second = Job(after, make, split).load(state)
    assert second.state().keys() == state.keys()
    rest = flat(second.run())
    assert sorted(begun + rest) == list(range(n))
    assert second.workers[0].sharded.epoch == 2
    assert sorted(flat(second.run())) == list(range(n))


def test_resume_goes_on_in_the_same_order() -> None:
    for name, (make, _) in resumable(30).items():
        torch.manual_seed(4)
        whole = flat(Job(2, make).run())
        torch.manual_seed(4)
        first = Job(2, make)
        begun = flat(first.run(num_steps=1))
        rng = torch.get_rng_state()
        second = Job(1, make).load(first.state())
        assert begun + flat(second.run()) == whole, name
        assert torch.equal(torch.get_rng_state(), rng), f"{name}: a resumed epoch draws nothing"


def test_epochs_after_a_resume_are_those_of_an_uninterrupted_run() -> None:
    for name in ("shuffled", "generator", "shuffled stream"):
        torch.manual_seed(4)
        job = Job(2, resumable(30)[name][0])
        epochs = [flat(job.run()) for _ in range(3)]
        torch.manual_seed(4)
        first = Job(2, resumable(30)[name][0])
        first.run()
        begun = flat(first.run(num_steps=2))
        second = Job(2, resumable(30)[name][0]).load(first.state())
        assert begun + flat(second.run()) == epochs[1], name
        assert flat(second.run()) == epochs[2], name


@pytest.mark.parametrize("name", resumable(1))
def test_state_at_the_very_end_starts_the_next_epoch(name: str) -> None:
    make, n = resumable(12)[name]
    first = Job(2, make)
    first.run(num_steps=2)  # all of them, but the loop has not ended
    second = Job(2, make).load(first.state())
    assert sorted(flat(second.run())) == list(range(n))
    assert second.workers[0].sharded.epoch == 2
    assert second.state() == {"epoch": 2, "consumed": 0}


def test_state_before_and_between_epochs() -> None:
    job = Job(2, lambda _: DataLoader(numbers(9), 2, shuffle=True))
    assert job.state() == {"epoch": 0, "consumed": 0}
    job.run()
    assert job.state() == {"epoch": 1, "consumed": 0}
    other = Job(3, lambda _: DataLoader(numbers(9), 2, shuffle=True)).load(job.state())
    assert other.workers[0].sharded.epoch == 1
    assert sorted(flat(other.run())) == list(range(9))


def test_state_of_a_shuffled_loader_is_small() -> None:
    job = Job(2, lambda _: DataLoader(numbers(1000), 10, shuffle=True))
    job.run(num_steps=3)
    state = job.state()
    assert state["consumed"] == 60
    assert state["order"].numel() == 1


def test_resume_refuses_another_loader() -> None:
    job = Job(2, lambda _: DataLoader(numbers(20), 2, shuffle=True))
    job.run(num_steps=1)
    with pytest.raises(CheckpointError, match="another kind"):
        Job(1, lambda _: DataLoader(numbers(20), 2)).load(job.state())
    with pytest.raises(CheckpointError, match="20 samples, and the loader has 21"):
        Job(1, lambda _: DataLoader(numbers(21), 2, shuffle=True)).load(job.state())
    with pytest.raises(CheckpointError, match="epoch and consumed"):
        job.load({"model": 1})


# Iterating


@pytest.mark.parametrize("name", resumable(1))
def test_a_new_iteration_is_a_new_epoch(name: str) -> None:
    make, n = resumable(30)[name]
    job = Job(2, make)
    job.run(num_steps=2)
    assert job.workers[0].sharded.epoch == 0
    old = [worker.batches for worker in job.workers]
    assert sorted(flat(job.run())) == list(range(n))
    assert job.workers[0].sharded.epoch == 2
    list(old[0] or ())  # an iteration left behind moves nobody's place
    assert job.state() == {"epoch": 2, "consumed": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_an_epoch_ends_the_loaders_workers(stream: bool) -> None:
    dataset: Any = Stream(40) if stream else numbers(40)
    job = Job(1, lambda _: DataLoader(dataset, 2, num_workers=2))
    gc.disable()  # by reference counting alone, as with a plain loader
    try:
        for _ in job.workers[0].sharded:
            assert multiprocessing.active_children()
            break
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


def test_one_worker_reads_a_stream_like_the_loader_itself() -> None:
    loader = DataLoader(ShuffledStream(15), 4)
    job = Job(1, lambda _: loader)
    torch.manual_seed(3)
    plain, rng = [batch.tolist() for _ in range(2) for batch in loader], torch.rand(2)
    torch.manual_seed(3)
    assert [batch.tolist() for _ in range(2) for batch in job.run()[0]] == plain
    assert torch.equal(torch.rand(2), rng)


def test_counts_are_told_just_before_the_batch() -> None:
    events: list[Any] = []
    sharded = ShardedLoader(
        DataLoader(numbers(3), 2), Member(Board(1), 0), split=False, consumer=Counting(events)
    )
    for batch in sharded:
        events.append(batch.tolist())
    assert events == [[2], [0, 1], [1], [2]]


def test_only_own_samples_are_loaded() -> None:
    loaded: Counter[int] = Counter()

    class Watched(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            loaded[index] += 1
            return super().__getitem__(index)

    Job(3, lambda _: DataLoader(Watched(torch.arange(24)), 4)).run()
    assert loaded == Counter(range(24))


# Refusals


def test_not_a_loader() -> None:
    with pytest.raises(TypeError, match=r"not a list.*session\.rank"):
        Job(1, lambda _: [1, 2])  # type: ignore[arg-type,return-value]


def test_distributed_sampler() -> None:
    sampler = DistributedSampler(numbers(8), num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="plain loader"):
        Job(1, lambda _: DataLoader(numbers(8), 2, sampler=sampler))


@pytest.mark.parametrize("sampler", [["a", "b"], [(0, 1), (1, 2)], [0.5, 1.5]])
def test_indices_that_are_not_integers(sampler: Any) -> None:
    job = Job(2, lambda _: DataLoader(numbers(8), 2, sampler=sampler))
    for worker in job.workers:  # on every worker, so that none is left waiting
        with pytest.raises(ConfigError, match="not integers"):
            worker.run()


@pytest.mark.parametrize(
    ("make", "split", "error", "match"),
    [
        (lambda r: DataLoader(numbers(8), 2 + r), True, ConfigError, "2 on worker 0 and 3 on"),
        (lambda r: DataLoader(Stream(8), 2 + r), False, ConfigError, "batch size"),
        (lambda r: DataLoader(numbers(8 + r), 2), False, MismatchError, "8 on worker 0 and 9 on"),
        (lambda r: DataLoader(numbers(8), 2, shuffle=r > 0), False, MismatchError, "kind"),
    ],
)
def test_workers_that_do_not_match(make: Any, split: bool, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        Job(2, make, split)


# Batches


@dataclass(frozen=True)
class Record:
    x: Tensor
    names: list[str]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(4, 2), 4),
        (torch.tensor(1.0), 1),
        (np.zeros((3, 2)), 3),
        ({"k": 2, "x": torch.zeros(5), "y": torch.zeros(7)}, 5),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ([torch.zeros(4), {"x": torch.zeros(4)}], 4),
        ([torch.zeros(2), torch.zeros(5), torch.zeros(1)], 3),
        (["a", "b", "c"], 3),
        ([("a", "b", "c"), ("d", "e", "f")], 3),
        ((["a", "b"], torch.zeros(2)), 2),
        (Record(torch.zeros(6), ["a"] * 6), 6),
        (pack_sequence([torch.zeros(3), torch.zeros(1)]), 2),
        ([], 0),
        ("text", 1),
    ],
)
def test_count(batch: Any, expected: int) -> None:
    assert count(batch) == expected


def test_take() -> None:
    part, x = slice(1, 3), torch.arange(4)
    assert take(x, part, 4).tolist() == [1, 2]
    assert take(["a", "b", "c", "d"], part, 4) == ["b", "c"]
    record = take(Record(x, list("abcd")), part, 4)
    assert record.names == ["b", "c"]
    assert record.x.tolist() == [1, 2]
    pair = take(Pair(x, "all"), part, 4)
    assert isinstance(pair, Pair)
    assert pair.name == "all"
    # One tensor is as long as the batch by chance: a list is still one of samples.
    ragged = [torch.zeros(4), torch.zeros(2), torch.zeros(7), torch.zeros(1)]
    assert [len(t) for t in take(ragged, part, 4)] == [2, 7]
    assert empty([("a", "b"), ("c", "d")], 2) == [(), ()]
    with pytest.raises(ConfigError, match="PackedSequence"):
        empty(pack_sequence([torch.zeros(3)]), 1)
