"""A parallelize() that raises leaves nothing behind, and another one works."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import ConfigError, MismatchError
from tests.support.workers import run_workers

ROWS, WIDTH = 20, 4


class Net(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH)
        self.second = nn.Embedding(ROWS, WIDTH, device=device)
        self.third = nn.Embedding(ROWS, WIDTH, device=device)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.first(ids) + self.second(ids) + self.third(ids)).mean()


def wrong(*args: Any) -> Tensor:
    raise ConfigError("no start values")


def groups() -> set[str]:
    return set(torch.distributed.distributed_c10d._world.pg_names.values())


def fail_and_start(what: str) -> dict[str, Tensor]:
    import parallax

    mine = int(os.environ.get("RANK", "0"))
    torch.manual_seed(1)
    model = Net("meta" if what == "init" else "cpu")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"timeout_seconds": 20.0}
    # The threads and the default group are those of another session, which stays.
    other = nn.Linear(2, 2)
    parallax.parallelize(other, torch.optim.SGD(other.parameters(), lr=0.1))
    threads, made = set(threading.enumerate()), groups()
    keys = [len(each._backward_hooks or ()) for each in model.parameters()]
    for _ in range(2):
        if what == "init":
            bad = {"init": {"third.weight": wrong}, **options}
            with pytest.raises(ConfigError, match="no start values"):
                parallax.parallelize(model, optimizer, **bad)
            assert model.second.weight.is_meta
            assert model.third.weight.is_meta
        elif what == "mismatch":
            optimizer.param_groups[0]["eps"] = float(mine)
            with pytest.raises(MismatchError):
                parallax.parallelize(model, optimizer, **options)
            optimizer.param_groups[0]["eps"] = 1e-10
        elif what == "run_dir":
            with pytest.raises(ConfigError):
                parallax.parallelize(model, optimizer, run_dir="/proc/nowhere", **options)
        assert set(threading.enumerate()) == threads
        assert groups() == made
        assert [len(each._backward_hooks or ()) for each in model.parameters()] == keys
        assert not optimizer._optimizer_step_pre_hooks
        assert all(type(each) is nn.Parameter for each in model.parameters())
    session = parallax.parallelize(model, optimizer, **options)
    for step in range(3):
        model(torch.tensor([step, session.rank])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return session.state_dict()


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("what", ["init", "mismatch", "run_dir"])
def test_another_session_begins_after_a_failed_start(what: str, num_workers: int) -> None:
    found = run_workers(fail_and_start, num_workers, what)[0]
    expected = found if what == "init" else run_workers(fail_and_start, num_workers, "")[0]
    assert all(bool(value.isfinite().all()) for value in found.values())
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
