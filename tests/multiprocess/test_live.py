"""What a script changes after parallelize(): exact, or a clear error, and never silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from parallax.errors import ConfigError, UnsupportedError, WholeTableError
from tests.support.models import Lookup, make_batches
from tests.support.parity import assert_same, share
from tests.support.workers import run_workers


def start(form: str = "embedding", optimizer: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    import parallax

    torch.manual_seed(5)
    model = Lookup(form).double()
    made = (optimizer or _sgd)(model)
    return model, made, parallax.parallelize(model, made, **options)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any, session: Any) -> None:
    for batch in make_batches(2, dtype=torch.float64):
        mine = share(batch, session.rank, session.num_workers, None)
        model(mine).backward()
        optimizer.step()
        optimizer.zero_grad()


def differentiable_later() -> None:
    model, optimizer, session = start()
    step(model, optimizer, session)
    optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(ConfigError, match="an option was set with which SGD with differentiable"):
        step(model, optimizer, session)


def decay_of_lazy_and_other_tables_later() -> None:
    import parallax

    model = nn.ModuleList(nn.Embedding(8, 2) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallax.parallelize(model, optimizer, lazy=["0.weight"]):
        optimizer.param_groups[0]["weight_decay"] = 0.1
        model[0](torch.tensor([1])).sum().backward()
        with pytest.raises(ConfigError, match=r"'0.weight' \(lazy\) and '1.weight' \(not lazy\)"):
            optimizer.step()


def decay_of_a_lazy_table_later() -> None:
    model, optimizer, session = start(lazy=True)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    step(model, optimizer, session)
    assert session.plan["table.weight"].row_rule == "touched rows"


def parameters_added_later() -> None:
    model, optimizer, session = start()
    model.extra = nn.Linear(2, 2)
    optimizer.add_param_group({"params": model.extra.parameters()})
    with pytest.raises(ConfigError, match=r"shape \(2, 2\) after parallelize\(\)"):
        step(model, optimizer, session)


def step_inside_backward() -> None:
    import parallax

    model = Lookup("embedding")
    model.out.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UnsupportedError, match="'out.weight' has a post-accumulate-grad hook"):
        parallax.parallelize(model, _sgd(model))


def gradients_one_by_one() -> None:
    model, _, _ = start()
    loss = model(make_batches(1, dtype=torch.float64)[0])
    with pytest.raises(UnsupportedError, match="table 'table.weight' cannot be asked for"):
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    with pytest.raises(UnsupportedError, match="table 'table.weight' cannot be asked for"):
        loss.backward(inputs=list(model.parameters()))


def sparse_adam_on_tied() -> None:
    import parallax

    model = Lookup("tied")
    table = [model.table.weight]
    rest = list(model.out.parameters())
    optimizers = [torch.optim.SparseAdam(table), torch.optim.Adam(rest)]
    with pytest.raises(UnsupportedError, match="which SparseAdam does not take"):
        parallax.parallelize(model, optimizers)


def reads_do_not_make_it_dense() -> None:
    model, optimizer, session = start()
    weight = model.table.weight
    average = torch.zeros(tuple(weight.shape), dtype=torch.float64)
    for _ in range(2):
        hidden = weight.new_zeros(2, 3)
        assert torch.zeros_like(weight).shape == weight.shape
        assert hidden.dtype == torch.float64
        step(model, optimizer, session)
        with torch.no_grad():
            average.add_(weight, alpha=0.5)
    assert session.plan["table.weight"].route.value == "sharded"
    assert bool(average.isfinite().all())


def attributes_are_local() -> None:
    model, optimizer, session = start(timeout_seconds=10.0)
    step(model, optimizer, session)
    weight = model.table.weight
    if session.rank == 1:  # Alone: a collective would not return.
        names = [name for name in dir(Tensor) if not callable(getattr(Tensor, name))]
        for name in names:
            if name in ("T", "mT", "H", "mH", "real", "imag"):  # operations on all rows
                continue
            try:
                found = getattr(weight, name)
            except (RuntimeError, AttributeError, WholeTableError):
                continue
            assert not isinstance(found, Tensor), name
        with pytest.raises(WholeTableError, match=r"reading \.data needs all rows of 'table"):
            weight.data  # noqa: B018
        with pytest.raises(WholeTableError, match=r"setting \.grad_dtype needs all rows"):
            weight.grad_dtype = torch.float32
        assert getattr(weight, "grad_dtype", torch.float64) == torch.float64
        with torch.no_grad():
            assert getattr(weight, "grad_dtype", torch.float64) == torch.float64
    assert session.plan["table.weight"].route.value == "sharded"
    step(model, optimizer, session)
    assert (weight.T @ torch.ones(len(weight), dtype=torch.float64)).requires_grad
    assert session.plan["table.weight"].route.value == "all-reduce"


def weights_as_tensors() -> None:
    _, _, session = start()
    session.weight(torch.tensor(3))
    for wrong in (-1, float("nan"), "three", torch.zeros(2)):
        with pytest.raises(ConfigError, match="weight\\(\\) takes this worker's count"):
            session.weight(wrong)


@pytest.mark.parametrize(
    "check",
    [
        differentiable_later,
        decay_of_lazy_and_other_tables_later,
        decay_of_a_lazy_table_later,
        parameters_added_later,
        step_inside_backward,
        gradients_one_by_one,
        sparse_adam_on_tied,
        reads_do_not_make_it_dense,
        attributes_are_local,
        weights_as_tensors,
    ],
)
def test_on_two_workers(check: Any) -> None:
    run_workers(check, 2)


# Exact all the same -----------------------------------------------------------------------


def hooked(together: bool) -> dict[str, Tensor]:
    import parallax

    torch.manual_seed(5)
    model = Lookup("embedding").double()
    mask = (torch.arange(len(model.table.weight)) % 2)[:, None].double()
    model.table.weight.register_hook(lambda gradient: gradient * mask)
    optimizer = _sgd(model)
    session = parallax.parallelize(model, optimizer) if together else None
    for batch in make_batches(5, dtype=torch.float64):
        if session is not None:
            batch = share(batch, session.rank, session.num_workers, (5, 7))
            session.weight(len(batch[0]))
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if session is None else session.state_dict()


def test_hooks_on_a_table_see_its_gradient() -> None:
    assert_same(run_workers(hooked, 2, True)[0], hooked(False), torch.float64)


def after_a_loader(together: bool) -> dict[str, Tensor]:
    """The last batch of a loader has one sample; what comes after counts alike again."""
    import parallax

    torch.manual_seed(5)
    model = Lookup("embedding").double()
    optimizer = _sgd(model)
    session = parallax.parallelize(model, optimizer)
    ids, targets = make_batches(1, size=5, dtype=torch.float64)[0]
    size = 4 if session.num_workers == 1 else 2
    for batch in session.shard(DataLoader(TensorDataset(ids, targets), batch_size=size)):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    step(model, optimizer, session)
    return session.state_dict()


def test_counts_of_a_loader_end_with_it() -> None:
    assert_same(run_workers(after_a_loader, 2, True)[0], after_a_loader(False), torch.float64)


def two_optimizers(together: bool) -> dict[str, Tensor]:
    import parallax

    torch.manual_seed(5)
    model = Lookup("embedding").double()
    optimizers = [
        torch.optim.SGD([model.table.weight], lr=0.1),
        torch.optim.SGD(model.out.parameters(), lr=0.1),
    ]
    session = parallax.parallelize(model, optimizers) if together else None
    for batch in make_batches(5, dtype=torch.float64):
        if session is not None:
            batch = share(batch, session.rank, session.num_workers, (3, 9))
            session.weight(len(batch[0]))
        for optimizer in optimizers:
            model(batch).backward()
            optimizer.step()
            model.zero_grad()
    return model.state_dict() if session is None else session.state_dict()


def test_a_weight_holds_until_all_optimizers_have_stepped() -> None:
    found = run_workers(two_optimizers, 2, True)[0]
    assert_same(found, two_optimizers(False), torch.float64)


def clipped_by_hand(together: bool) -> dict[str, Tensor]:
    import parallax

    torch.manual_seed(5)
    model = Lookup("frozen").double()
    optimizer = _sgd(model)
    session = parallax.parallelize(model, optimizer) if together else None
    dense = list(model.out.parameters())
    for batch in make_batches(5, dtype=torch.float64):
        if session is not None:
            batch = share(batch, session.rank, session.num_workers, (5, 7))
            session.weight(len(batch[0]))
        gradients = torch.autograd.grad(model(batch), dense)
        for parameter, gradient in zip(dense, gradients, strict=True):
            parameter.grad = gradient
        if session is None:
            nn.utils.clip_grad_norm_(dense, 0.1)
        else:
            session.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if session is None else session.state_dict()


def test_the_session_clips_gradients_that_were_set_by_hand() -> None:
    found = run_workers(clipped_by_hand, 2, True)[0]
    assert_same(found, clipped_by_hand(False), torch.float64)


class Averaging(nn.Module):
    """Puts a new tensor in its buffer's place in each forward, and has another on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(3, device="meta")
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        return self.out(self.norm(inputs)).pow(2).mean()


def changing_buffers() -> list[Tensor]:
    import parallax

    model = Averaging()
    optimizer = _sgd(model)
    session = parallax.parallelize(model, optimizer)
    for i in range(3):
        model(
            torch.randn(4, 3, generator=torch.Generator().manual_seed(i + session.rank))
        ).backward()
        optimizer.step()
    return [buffer.clone() for buffer in model.buffers()]


def test_buffers_that_are_replaced_are_given_out_too() -> None:
    first, second = run_workers(changing_buffers, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
