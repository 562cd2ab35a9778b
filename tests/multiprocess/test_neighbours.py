"""Workers of one host ask and push together: the same result, each row once over the link."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from parallax.errors import OutOfStepError
from parallax.planning import cost
from parallax.tables.rowmap import RowMap
from tests.support.parity import Case, assert_same, train_alone, train_together
from tests.support.workers import run_on_hosts

HOSTS = [(2, 2), (1, 2), (3, 2)]


@pytest.mark.parametrize("form", "padding twice bag-weights getitem-negative one-dim".split())
def test_lookups_are_exact(form: str) -> None:
    check(Case(form, shares=(5, 0, 3, 4)), (2, 2), "sharded")


@pytest.mark.parametrize("form", ["tied-in-forward", "regularised"])
@pytest.mark.filterwarnings("ignore:parameter .* is used whole")
def test_tables_used_whole_are_exact(form: str) -> None:
    check(Case(form, shares=(5, 4, 3)), (2, 1), "all-reduce")


@pytest.mark.parametrize("hosts", HOSTS)
def test_hosts_may_have_different_numbers_of_workers(hosts: tuple[int, ...]) -> None:
    check(Case("several"), hosts, "sharded")


def check(case: Case, hosts: tuple[int, ...], route: str) -> None:
    found, routes = zip(*run_on_hosts(train_together, hosts, case), strict=True)
    assert set(routes) == {route}
    assert_same(found[0], train_alone(case), case.dtype)


# Bytes --------------------------------------------------------------------------------------

ROWS, WIDTH, BATCH, STEPS = 5_000, 64, 500, 8


class Net(nn.Module):
    """Two tables of a family, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.tags = nn.Embedding(ROWS, WIDTH)
        self.marks = nn.Embedding(ROWS, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids[:, 0]) * self.tags(ids[:, 1])
        return found.square().mean() + self.marks(ids[:, 1]).square().mean()


def batches(num_workers: int) -> Tensor:
    """Ids as words of a text have them: some of them often."""
    generator = torch.Generator().manual_seed(5)
    even = torch.rand(STEPS * num_workers * BATCH, 2, generator=generator)
    return (ROWS**even).long() - 1


@dataclass
class Outcome:
    """Of a worker."""

    state: dict[str, Tensor]
    totals: dict[str, Any]
    local_bytes: int
    plan: Any
    seen: list[Tensor]
    """Its ids, by step."""


def train(lookahead: bool, merge_hosts: bool) -> Outcome:
    import parallax

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    options = {"lookahead": lookahead, "merge_hosts": merge_hosts, "replan": False}
    session = parallax.parallelize(model, optimizer, **options)
    data: Any = batches(session.num_workers)
    seen = []
    for batch in session.shard(DataLoader(data, BATCH)):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        seen.append(batch)
    plan, ledger, state = session.plan, session.ledger, session.state_dict()
    session.close()
    return Outcome(state, dict(ledger.totals), ledger.local_bytes, plan, seen)


def distinct(found: list[Outcome], ranks: range, column: int) -> list[Tensor]:
    """The rows that these workers touch together, by step."""
    steps = zip(*(found[rank].seen for rank in ranks), strict=True)
    return [torch.cat(parts)[:, column].unique() for parts in steps]


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("hosts", [(2, 2), (1, 3)])
def test_a_row_crosses_the_link_of_a_host_once(hosts: tuple[int, ...], lookahead: bool) -> None:
    merged, plain = (run_on_hosts(train, hosts, lookahead, merges) for merges in (True, False))
    for name, value in plain[0].state.items():
        torch.testing.assert_close(merged[0].state[name], value)
    row_map = RowMap.even(ROWS, sum(hosts))
    ranks = [range(hosts[0]), range(hosts[0], sum(hosts))]
    for name, width, column in (("words", WIDTH, 0), ("tags", WIDTH, 1), ("marks", 3, 1)):
        asked = away = 0
        for here in ranks:
            for rows in distinct(merged, here, column):
                owners = row_map.owners(row_map.slots(rows))
                asked += len(rows)
                away += int(((owners < here.start) | (owners >= here.stop)).sum())
        totals = [outcome.totals[f"{name}.weight"] for outcome in merged]
        assert sum(entry.asked_rows for entry in totals) == asked
        assert sum(entry.rows for entry in totals) > 1.1 * asked
        assert sum(entry.sent_bytes for entry in totals) == 2 * away * (4 * width + cost.ID_BYTES)
        if hosts[0] != hosts[1]:  # The formula is for hosts alike.
            continue
        lines = [outcome.plan[f"{name}.weight"] for outcome in merged]
        predicted = sum(line.predicted_bytes for line in lines)
        assert sum(line.bytes_per_step for line in lines) == pytest.approx(predicted, rel=0.05)
    assert all(outcome.local_bytes == 0 for outcome in plain)
    assert [outcome.local_bytes > 0 for outcome in merged] == [
        number > 1 for number in hosts for _ in range(number)
    ]


# The plan -----------------------------------------------------------------------------------


def train_apart(folder: str | None, batch_size: int) -> tuple[dict[str, Tensor], bool]:
    """Every row is in one sample only, so workers have nothing to share."""
    import parallax

    torch.manual_seed(0)
    model = nn.Embedding(1600, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session = parallax.parallelize(model, optimizer, run_dir=folder)
    ids: Any = torch.randperm(1600, generator=torch.Generator().manual_seed(1))
    for batch in session.shard(DataLoader(ids, batch_size)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    state, is_alone = session.state_dict(), session.plan.num_hosts is None
    session.close()
    return state, is_alone


def test_workers_that_share_nothing_go_on_alone(tmp_path: Path) -> None:
    found = run_on_hosts(train_apart, (2, 2), str(tmp_path), 20)
    assert all(is_alone for _, is_alone in found)
    expected, _ = train_apart(None, 80)
    torch.testing.assert_close(found[0][0]["weight"], expected["weight"])
    assert "workers ask each for itself" in (tmp_path / "journal.jsonl").read_text()


def train_again(folder: str | None, batch_size: int) -> tuple[dict[str, Tensor], list[bool]]:
    """Links between hosts are fast at first, and slow when they are measured again."""
    import parallax
    from parallax.planning import links
    from parallax.planning.cost import Cluster, Link
    from parallax.planning.drift import Drift

    rates = itertools.chain([1e10], itertools.repeat(1e8))
    if folder is not None:  # In a process of its own.
        Drift.of_waits = lambda *_: True  # type: ignore[method-assign]
        links.measure = lambda *_: Cluster(2, 2, Link(next(rates), 1e-4), Link(1e9, 1e-5))
    torch.manual_seed(0)
    model = nn.Embedding(200, 16)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, run_dir=folder)
    generator = torch.Generator().manual_seed(1)
    ids: Any = (200 ** torch.rand(220 * 80, generator=generator)).long() - 1
    together = []
    for batch in session.shard(DataLoader(ids, batch_size)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        together.append(session.plan.num_hosts == 2)
    state = session.state_dict()
    session.close()
    return state, together


def test_workers_ask_together_again_when_links_have_become_slow(tmp_path: Path) -> None:
    found = run_on_hosts(train_again, (2, 2), str(tmp_path), 20)
    # Looked at after steps 5, 25, 105 and 205, when pushes have found their parts.
    assert all(together == [True] * 4 + [False] * 200 + [True] * 16 for _, together in found)
    expected, _ = train_again(None, 80)
    torch.testing.assert_close(found[0][0]["weight"], expected["weight"])
    journal = (tmp_path / "journal.jsonl").read_text()
    assert "links between hosts carry 800 Mbit/s, 80.0 Gbit/s before" in journal
    assert "workers of a host ask together: links between hosts carry" in journal


# Mistakes -----------------------------------------------------------------------------------


def look_up_apart(saves: str) -> str:
    """One worker is in another operation than the others."""
    import parallax

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, timeout_seconds=60)
    try:
        if session.rank != 3:
            model.tags(torch.arange(3))
        elif saves:
            session.save(saves)
        else:
            model.words(torch.arange(3))
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["a lookup of 'words.weight'", "saving"])
def test_a_worker_that_is_apart_is_named_by_all_at_once(what: str, tmp_path: Path) -> None:
    found = run_on_hosts(look_up_apart, (2, 2), str(tmp_path) if what == "saving" else "")
    for message in found[:3]:
        assert f"worker 3 is in {what}" in message
    assert "worker 3 is in" in found[3]
    assert "but worker 0 is in a lookup of 'tags.weight'" in found[3]
