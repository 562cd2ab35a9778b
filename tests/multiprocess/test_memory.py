"""A worker holds 1/N of a table and of its state; a table may never have been whole at all."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from tests.support.workers import run_workers

ROWS, WIDTH = 50_000, 32
TABLE_BYTES = ROWS * WIDTH * 4


class Net(nn.Module):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=3, device=device)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).pow(2).mean()


def tensor_bytes() -> int:
    """Memory of all tensors that live in this process, each storage once."""
    gc.collect()
    seen = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                if thing.device.type == "cpu" and thing.layout is torch.strided:
                    storage = thing.untyped_storage()
                    seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def held(optimizer_name: str, device: str | None) -> int:
    import parallax

    before = tensor_bytes()
    model = Net(device)
    kind = getattr(torch.optim, optimizer_name)
    optimizer = kind(model.parameters(), lr=0.1)
    session = parallax.parallelize(model, optimizer, lazy=True)
    for step in range(3):
        model(torch.arange(50) * 7 + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = tensor_bytes()
    assert session.plan["table.weight"].route.value == "sharded"
    return after - before


@pytest.mark.parametrize(("optimizer", "copies"), [("SGD", 1), ("Adagrad", 2), ("Adam", 3)])
@pytest.mark.parametrize("device", [None, "meta"])
def test_a_worker_holds_its_share(optimizer: str, copies: int, device: str | None) -> None:
    for num_bytes in run_workers(held, 4, optimizer, device):
        assert num_bytes == pytest.approx(copies * TABLE_BYTES / 4, rel=0.05)


def meta_values() -> tuple[dict[str, Tensor], str]:
    import parallax

    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    session = parallax.parallelize(model, optimizer, seed=5, routes={"table.weight": "sharded"})
    ids = torch.tensor([1, 2, ROWS - 1])
    model(ids).backward()
    optimizer.step()
    return session.state_dict(), str(model.out.weight.device)


def test_start_values_do_not_depend_on_the_number_of_workers() -> None:
    (alone, _), *_ = run_workers(meta_values, 1)
    three = run_workers(meta_values, 3)
    (together, device), *_ = three
    assert device == "cpu"
    # The dense layer's start values come from rank 0's generator, the table's from its rows.
    untouched = torch.tensor([i for i in range(ROWS) if i not in (1, 2, ROWS - 1)])
    assert torch.equal(alone["table.weight"][untouched], together["table.weight"][untouched])
    rows = together["table.weight"]
    assert rows[3].abs().max() == 0
    assert float(rows.mean()) == pytest.approx(0, abs=0.01)
    assert float(rows.std()) == pytest.approx(1, abs=0.01)
    assert rows.unique(dim=0).shape[0] == ROWS


def meta_bare() -> None:
    import parallax

    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(10, 2, device="meta"))
    model.out = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.parallelize(model, optimizer, routes={"weight": "sharded"})


def test_a_bare_table_on_meta_needs_an_initializer() -> None:
    with pytest.raises(AssertionError, match="Config\\(init="):
        run_workers(meta_bare, 2)
