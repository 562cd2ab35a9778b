"""Prefetch: the same result as one process, whatever the batches and the script do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from parallax.planning import cost
from tests.support.models import Squares
from tests.support.workers import outcomes_of, run_on_hosts, run_workers

ROWS, SAMPLES, BATCH = 60, 52, 12
FOREVER = 10**6
BEAT_SECONDS = 0.05
"""The time in which out-of-band pulls are answered: a second would be most of these tests' time."""


@dataclass(frozen=True)
class Script:
    """What a training does that an ordinary one does not."""

    ids: str = "random"
    """Of samples: random, all the same rows, or never those of the batches before and after."""
    marked: tuple[int, ...] = ()
    """Samples whose words and tags are shifted in forward."""
    made_inside: bool = False
    accumulate: int = 1
    all_unsynced: bool = False
    leave_after: int = FOREVER
    steps_first: bool = False
    late_backward: bool = False
    keeps_gradient: bool = False
    second_forward: bool = False
    evaluates: bool = False
    draws: bool = False
    assigns: bool = False
    reloads: bool = False
    zips: bool = False
    weighs_late: bool = False
    second_table_from: int = 0
    has_unused_layer: bool = False
    has_own_function: bool = False
    """All rows of a table get a gradient, past its lookups."""
    optimizer: str = "Adagrad"
    lookahead: bool = True
    is_early: bool = True
    """Whether rows come during the step before, as they do not on GPUs."""
    drop_last: bool = False
    reads_elsewhere: bool = False
    batch_size: int = BATCH
    """A share's weight is that of the batch handed out last: scripts that use an earlier one need
    shares that never differ."""


class Net(nn.Module):
    """Three tables, two of them alike; the first is looked up with two slices of the batch."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4)
        self.tags = nn.Embedding(ROWS, 3)
        self.marks = nn.Embedding(ROWS, 4)
        self.out = nn.Linear(7, 1)
        self.unused = nn.Linear(3, 2) if script.has_unused_layer else None
        self.script = script
        self.num_steps = 0

    def forward(self, windows: Tensor, tags: Tensor, marks: Tensor) -> Tensor:
        words = windows[:, :-1]
        if self.script.made_inside:
            words = (words * 5 + 1) % ROWS
        elif self.script.marked:
            words = torch.where(marks[:, None], (words + 1) % ROWS, words)
            tags[marks] = (tags[marks] + 1) % ROWS  # In the batch itself.
        found = self.words(words).mean(1) + self.words(windows[:, 1:]).mean(1)
        tagged = found.new_zeros(len(found), 3)
        if self.num_steps >= self.script.second_table_from:
            tagged = self.tags(tags)
            found = found + self.marks(tags)
        if self.script.has_own_function:
            found = found + Squares.apply(self.words.weight)  # type: ignore[no-untyped-call]
        if self.script.draws:
            found = found * torch.rand(())
        if self.script.late_backward:  # torch refuses a backward through a weight that was stepped
            return (found.sum(1) + tagged.sum(1)).square().mean()
        return self.out(torch.cat([found, tagged], 1)).square().mean()


class Samples(Dataset[tuple[Tensor, ...]]):
    def __init__(self, script: Script) -> None:
        generator = torch.Generator().manual_seed(3)
        self.windows = torch.randint(ROWS, (SAMPLES, 6), generator=generator)
        self.tags = torch.randint(ROWS, (SAMPLES,), generator=generator)
        if script.ids == "same":
            self.windows = torch.arange(6).expand(SAMPLES, 6).contiguous()
            self.tags = torch.zeros(SAMPLES, dtype=torch.int64)
        elif script.ids == "apart":
            third = torch.arange(SAMPLES) // script.batch_size % 3 * (ROWS // 3)
            self.windows = self.windows % (ROWS // 3) + third[:, None]
            self.tags = self.tags % (ROWS // 3) + third
        self.marks = torch.tensor([i in script.marked for i in range(SAMPLES)])
        self.draws = script.draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if self.draws and index % BATCH == 0:
            torch.rand(())
        return self.windows[index], self.tags[index], self.marks[index]


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


def read_elsewhere(loader: Any) -> Iterator[Any]:
    """Batches by way of a thread of the script's own, which is ahead of it."""
    batches: queue.Queue[Any] = queue.Queue(maxsize=1)

    def read() -> None:
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := batches.get(timeout=60)) is not None:
        yield batch


def assign(model: Net, value: float) -> None:
    with torch.no_grad():
        model.words.weight.copy_(torch.full((ROWS, 4), value).double())


def train(script: Script, folder: str = "") -> tuple[dict[str, Tensor], list[int]]:
    """Three epochs; gives rank 0's state and the headers of each of this worker's steps."""
    import parallax
    from parallax.cluster import heartbeats
    from parallax.comm import pull

    heartbeats.BEAT_SECONDS = BEAT_SECONDS
    pull.EARLY_BYTES = 0 if script.is_early else FOREVER
    torch.manual_seed(0)
    model = Net(script).double()
    optimizer = getattr(torch.optim, script.optimizer)(model.parameters(), lr=0.1)
    routes = {"words.*": "sharded", "tags.*": "sharded", "marks.*": "sharded"}
    session = parallax.parallelize(model, optimizer, routes=routes, lookahead=script.lookahead)
    if not script.is_early:
        session._engine.prefetcher._is_early = False  # From the first batch on, as on a GPU.
    headers = count_headers(session)
    data = Samples(script)
    loader, others = (
        session.shard(DataLoader(data, script.batch_size, drop_last=script.drop_last), split=True)
        for _ in range(2)
    )
    counts, waiting = [], None

    def step() -> None:
        optimizer.step()
        if not script.keeps_gradient:
            optimizer.zero_grad()

    for epoch in range(3):
        batches = read_elsewhere(loader) if script.reads_elsewhere else loader
        for number, batch in enumerate(
            zip(batches, others, strict=True) if script.zips else batches
        ):
            batch = batch[0] if script.zips else batch
            before = headers()
            if script.steps_first and number:
                step()
            if script.assigns and number == 2:
                assign(model, 0.25 + epoch)
            loss = model(*batch)
            if script.weighs_late:
                session.weight(len(batch[0]))
            if script.late_backward:
                loss, waiting = waiting, loss
            is_last = (number + 1) % script.accumulate == 0
            if loss is not None and is_last and not script.all_unsynced:
                loss.backward()
            elif loss is not None:
                with session.no_sync():
                    loss.backward()
            if script.second_forward:
                model(batch[0], (batch[1] + 1) % ROWS, batch[2]).backward()
            if loss is not None and is_last and not script.steps_first:
                step()
                model.num_steps += 1
            counts.append(headers() - before)
            if script.assigns and number == 3:
                assign(model, 0.5 + epoch)
            if script.evaluates and number == 1:
                with torch.no_grad():
                    for held_out in others:
                        model(*held_out)
            if script.reloads and number == 1 and epoch == 1:
                session.save(folder)
            if script.reloads and number == 2 and epoch == 1:
                session.load(folder)
                break
            if number + 1 >= script.leave_after:
                break
    state = session.state_dict()
    session.close()
    return state, counts


def assert_same(script: Script, *hosts: int, folder: str = "") -> list[list[int]]:
    """With so many workers on each host."""
    alone, _ = train(script, f"{folder}/alone")
    results = run_on_hosts(train, hosts, script, f"{folder}/together")
    for name, value in alone.items():
        torch.testing.assert_close(results[0][0][name], value, rtol=1e-10, atol=1e-10)
    return [counts for _, counts in results]


SCRIPTS = {
    "random rows": Script(),
    "the same rows in every step": Script(ids="same"),
    "no row in two steps in a row": Script(ids="apart"),
    "accumulation": Script(accumulate=2),
    "only no_sync before the step": Script(all_unsynced=True),
    "ids made in forward": Script(made_inside=True),
    "another epoch begins early": Script(leave_after=3),
    "the step comes first": Script(steps_first=True),
    "backward one batch later": Script(
        late_backward=True, ids="apart", drop_last=True, batch_size=10
    ),
    "gradients that stay": Script(keeps_gradient=True, ids="apart", optimizer="SGD"),
    "another forward after the backward": Script(second_forward=True),
    "evaluation in between": Script(evaluates=True),
    "evaluation and accumulation": Script(evaluates=True, accumulate=2),
    "rows assigned": Script(assigns=True),
    "a checkpoint loaded": Script(reloads=True),
    "two loaders at once": Script(zips=True),
    "a weight after forward": Script(weighs_late=True),
    "a second table later": Script(second_table_from=4),
    "plain SGD": Script(optimizer="SGD"),
    "only whole batches": Script(drop_last=True),
    "a function of its own": Script(has_own_function=True, ids="apart"),
    "read by a thread of its own": Script(reads_elsewhere=True, drop_last=True, batch_size=12),
    "switched off": Script(lookahead=False),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("hosts", [(2,), (2, 1)])
@pytest.mark.filterwarnings("ignore:table .* got a whole gradient")
def test_the_result_is_that_of_one_process(
    name: str, hosts: tuple[int, ...], tmp_path: Path
) -> None:
    assert_same(SCRIPTS[name], *hosts, folder=str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "random rows",
        "the same rows in every step",
        "accumulation",
        "ids made in forward",
        "another epoch begins early",
        "gradients that stay",
        "evaluation in between",
        "a checkpoint loaded",
        "two loaders at once",
    ],
)
def test_it_is_also_if_all_rows_come_late(name: str, tmp_path: Path) -> None:
    assert_same(replace(SCRIPTS[name], is_early=False), 2, 1, folder=str(tmp_path))


@pytest.mark.parametrize(
    "script",
    [
        Script(marked=(30,)),
        Script(marked=(0, 13, 26, 39)),
        Script(marked=(30, 44), accumulate=2),
        Script(marked=(30,), has_unused_layer=True),
        Script(marked=(30,), all_unsynced=True),
        Script(marked=(30,), weighs_late=True),
        Script(marked=(30,), leave_after=3, accumulate=3),
        Script(marked=(30, 31, 32, 33, 34, 35), zips=True),
        Script(marked=(0, 13, 26, 39), is_early=False),
    ],
)
def test_a_wrong_guess_on_one_worker_is_served(script: Script) -> None:
    assert_same(script, 3)


@pytest.mark.parametrize("is_early", [True, False])
def test_prefetched_lookups_need_no_headers(is_early: bool) -> None:
    """Four lookups and a reduction: once the tables are prefetched only the reduction has one."""
    for counts in assert_same(Script(drop_last=True, is_early=is_early), 2):
        assert counts[0] == 5
        assert counts[2:] == [1] * len(counts[2:])
    for counts in assert_same(Script(drop_last=True, lookahead=False), 2):
        assert counts == [5] * len(counts)


class Many(nn.Module):
    """Tables, of which a sample has one row each."""

    def __init__(self, num_tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 4) for _ in range(num_tables))

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return torch.cat(found, 1).square().mean()


def count_collectives(
    num_tables: int, num_steps: int, lookahead: bool = True, early_bytes: int = 0
) -> int:
    """In how many this worker takes part, in whatever thread."""
    import torch.distributed as dist

    import parallax
    from parallax.comm import pull

    pull.EARLY_BYTES = early_bytes
    made: list[str] = []

    def counted(name: str) -> None:
        function = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            made.append(name)
            return function(*args, **options)

        setattr(dist, name, call)

    for name in ("all_to_all_single", "all_gather", "all_reduce", "broadcast"):
        counted(name)
    torch.manual_seed(0)
    model = Many(num_tables)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    options = {"routes": {"*": "sharded"}, "replan": False, "lookahead": lookahead}
    session = parallax.parallelize(model, optimizer, **options)
    data: Any = torch.randint(ROWS, (num_steps * session.num_workers * BATCH, num_tables))
    for ids in session.shard(DataLoader(data, BATCH)):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    return len(made)


def test_collectives_do_not_grow_with_the_tables() -> None:
    """Of steps whose lookups are prefetched; so many tables that ids do not fit into a header."""
    few, many = (
        run_workers(count_collectives, 2, number, 16)[0]
        - run_workers(count_collectives, 2, number, 6)[0]
        for number in (16, 26)
    )
    assert few == many
    assert 0 < many < 10 * 10


@pytest.mark.parametrize(
    ("lookahead", "early_bytes", "more"), [(False, 0, 0), (True, 0, 2), (True, 1 << 20, 0)]
)
def test_a_step_sends_the_messages_that_cost_tells(
    lookahead: bool, early_bytes: int, more: int
) -> None:
    """With two workers, each collective is a message. Small batches have no early rows."""
    long, short = (
        run_workers(count_collectives, 2, 1, steps, lookahead, early_bytes)[0] for steps in (16, 6)
    )
    told = cost.sharded(cost.Touched(1), 8, cost.Cluster.unmeasured(2, 1)).messages
    assert long - short == 10 * (told + more)


def test_a_pass_that_was_left_does_not_end_foresight() -> None:
    for counts in assert_same(Script(leave_after=3), 2):
        assert counts[2:] == [1] * len(counts[2:])


def test_lookups_after_the_reduction_are_collective_again() -> None:
    script = Script(second_forward=True, drop_last=True)
    for counts in assert_same(script, 2):
        assert counts[2:] == [1 + 4 + 1] * len(counts[2:])


def test_a_table_whose_ids_are_made_in_forward_does_not_hold_up_the_other() -> None:
    for counts in assert_same(Script(made_inside=True, drop_last=True), 2):
        assert set(counts[2:]) == {3}  # two lookups of one table, and the reduction


def draw(lookahead: bool) -> list[float]:
    """Numbers that a script draws beside a dataset that draws as well."""
    import parallax

    torch.manual_seed(0)
    model = Net(Script()).double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    routes = {"words.*": "sharded", "tags.*": "sharded", "marks.*": "sharded"}
    session = parallax.parallelize(model, optimizer, routes=routes, lookahead=lookahead)
    loader = session.shard(DataLoader(Samples(Script(draws=True)), BATCH), split=True)
    drawn = []
    for batch in loader:
        drawn.append(float(torch.rand(())))
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    return drawn


def test_a_dataset_that_draws_is_not_read_ahead() -> None:
    assert run_workers(draw, 2, True) == run_workers(draw, 2, False)


def look_up_nonsense(kind: type[Exception]) -> None:
    import parallax

    torch.manual_seed(0)
    model = Net(Script(drop_last=True)).double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, routes={"*s.weight": "sharded"})
    loader = session.shard(DataLoader(Samples(Script()), BATCH), split=True)
    for number, (windows, tags, marks) in enumerate(loader):
        if number == 3 and session.rank == 1:
            tags = tags + ROWS if kind is IndexError else tags.double()
        model(windows, tags, marks).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (IndexError, "worker 1 is out of range for table 'tags.weight'"),
        (TypeError, "the ids on worker 1 for table 'tags.weight' must be a tensor of int64"),
    ],
)
def test_bad_ids_that_were_not_prefetched_are_raised_on_all_workers(
    kind: type[Exception], says: str
) -> None:
    for outcome in outcomes_of(look_up_nonsense, 3, kind):
        assert type(outcome.error) is kind, outcome.trace
        assert says in str(outcome.error)
