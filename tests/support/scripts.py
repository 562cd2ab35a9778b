"""Training loops that differ in one thing each, run alone on the joined batch or by workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import LENGTH, NUM_ROWS, WIDTH, Batch, make_batches
from tests.support.parity import share


class Net(nn.Module):
    """A table, a bare output table, dense layers, one of them used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH)
        self.weight = nn.Parameter(torch.randn(NUM_ROWS, WIDTH))
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch, extra: bool = False) -> Tensor:
        ids, targets = batch
        hidden = torch.tanh(self.hidden(self.table(ids).mean(1)))
        if extra:
            hidden = hidden + self.extra(hidden)
        score = (hidden * self.weight[ids[:, 0]]).sum(-1)
        return (score - targets).pow(2).mean()

    def loss(self, batch: Batch) -> Tensor:
        return self.forward(batch)


class Alone:
    """Stands for a session where there is none: the same script on the joined batch."""

    rank, num_workers = 0, 1

    def weight(self, count: float) -> None:
        pass

    def no_sync(self) -> Any:
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm, norm_type)

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())


Script = Callable[[Any, nn.Module, torch.optim.Optimizer, list[Batch]], None]
SCRIPTS: dict[str, Script] = {}


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


def build(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net().double()
    if optimizer == "adam":  # every dense parameter without a gradient must keep None
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def run_alone(name: str, optimizer: str = "adagrad") -> dict[str, Tensor]:
    model, chosen = build(optimizer)
    SCRIPTS[name](Alone(model), model, chosen, make_batches(20, dtype=torch.float64))
    return model.state_dict()


def run_together(
    name: str, optimizer: str = "adagrad", options: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    import parallax

    model, chosen = build(optimizer)
    with parallax.parallelize(model, chosen, **(options or {})) as session:
        shares = UNEVEN[session.num_workers]
        batches = make_batches(20, dtype=torch.float64)
        mine = [share(batch, session.rank, session.num_workers, shares) for batch in batches]
        SCRIPTS[name](session, model, chosen, mine)
        return session.state_dict()


UNEVEN = {2: (5, 7), 3: (6, 0, 6), 4: (1, 5, 4, 2)}


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


@script
def plain(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:
        session.weight(len(batch[0]))
        model(batch).backward()
        step(optimizer)


@script
def by_another_method(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:
        session.weight(len(batch[0]))
        model.loss(batch).backward()
        step(optimizer)


@script
def by_submodules(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for ids, targets in batches:
        session.weight(len(ids))
        hidden = model.hidden(model.table(ids).mean(1))
        (hidden.sum(-1) - targets).pow(2).mean().backward()
        step(optimizer)


@script
def forwards_before_a_backward(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    for batch, other in zip(batches[::2], batches[1::2], strict=True):
        session.weight(len(batch[0]))
        (model(batch) + 0.5 * model(other)).backward()
        step(optimizer)


@script
def backwards_before_a_step(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch, other in zip(batches[::2], batches[1::2], strict=True):
        session.weight(len(batch[0]))
        model(batch).backward()
        (0.5 * model(other)).backward()
        step(optimizer)


@script
def accumulated(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for i in range(0, len(batches), 4):
        for j, batch in enumerate(batches[i : i + 4]):
            with session.no_sync() if j < 3 else nullcontext():
                session.weight(len(batch[0]))
                (model(batch, extra=j == 0) / 4).backward()
        step(optimizer)


@script
def accumulated_with_changing_shares(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    """The shares change inside one accumulation, so that one weight for all would be wrong."""
    for i in range(0, len(batches), 2):
        with session.no_sync():
            session.weight(len(batches[i][0]))
            model(batches[i]).backward()
        ids, targets = batches[i + 1]
        if session.num_workers > 1 and session.rank == 0:
            ids, targets = ids[:0], targets[:0]
        if session.num_workers == 1:
            keep = UNEVEN_FIRST[0]
            ids, targets = ids[keep:], targets[keep:]
        session.weight(len(ids))
        model((ids, targets)).backward()
        step(optimizer)


UNEVEN_FIRST = [5]


@script
def accumulated_and_never_synced(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    for i in range(0, len(batches), 2):
        with session.no_sync():
            for batch in batches[i : i + 2]:
                session.weight(len(batch[0]))
                model(batch).backward()
        step(optimizer)


@script
def sometimes_unused(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    """`extra` gets a gradient in every third step; `never` in none."""
    for i, batch in enumerate(batches):
        session.weight(len(batch[0]))
        model(batch, extra=i % 3 == 0).backward()
        step(optimizer)


@script
def unfrozen_later(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for part in (model.hidden, model.table):
        part.requires_grad_(False)
    for i, batch in enumerate(batches):
        if i == 5:
            model.hidden.requires_grad_(True)
        if i == 10:
            model.table.requires_grad_(True)
            model.extra.requires_grad_(False)
        session.weight(len(batch[0]))
        model(batch, extra=True).backward()
        step(optimizer)


@script
def with_a_closure(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch)
            loss.backward()
            return loss

        session.weight(len(batch[0]))
        assert isinstance(optimizer.step(closure), Tensor)


@script
def gradients_kept_at_zero(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:
        optimizer.zero_grad(set_to_none=False)
        session.weight(len(batch[0]))
        model(batch).backward()
        optimizer.step()


@script
def discarded_gradients(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for i, batch in enumerate(batches):
        session.weight(len(batch[0]))
        model(batch).backward()
        if i % 2:
            optimizer.step()
        optimizer.zero_grad()


@script
def gradients_put_aside(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    """A gradient that a script has kept stays what it was, whatever the next backward brings."""
    layer = model.hidden.weight
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        session.weight(len(first[0]))
        model(first).backward()
        aside, layer.grad = layer.grad, None
        session.weight(len(second[0]))
        model(second).backward()
        layer.grad = layer.grad - 0.5 * aside
        step(optimizer)


@script
def views_put_aside(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    """As do views of gradients, where nothing tells that a script has them."""
    dense = [*model.hidden.parameters(), *model.extra.parameters()]
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        session.weight(len(first[0]))
        model(first, extra=True).backward()
        aside = [parameter.grad.detach()[..., 1:] for parameter in dense]
        optimizer.zero_grad()
        session.weight(len(second[0]))
        model(second, extra=True).backward()
        for parameter, view in zip(dense, aside, strict=True):
            parameter.grad[..., 1:] -= 0.5 * view
        step(optimizer)


@script
def gradients_kept_by_a_hook(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    """What a script gets hold of while the backward runs is the gradient of all in the end."""
    kept: list[Tensor] = []
    layer = model.hidden.weight
    layer.register_post_accumulate_grad_hook(lambda parameter: kept.append(parameter.grad))
    for batch in batches:
        session.weight(len(batch[0]))
        model(batch).backward()
        layer.grad = 0.5 * kept.pop()
        step(optimizer)


@script
def gradients_that_share_memory(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    for _ in batches:
        loss = (model.hidden.bias + model.extra.bias).square().sum()
        (gradient,) = torch.autograd.grad(loss, [model.hidden.bias])
        model.hidden.bias.grad = model.extra.bias.grad = gradient
        step(optimizer)


@script
def discarded_accumulation(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for i, batch in enumerate(batches):
        session.weight(len(batch[0]))
        if i % 2:
            model(batch).backward()
            optimizer.step()
        else:
            with session.no_sync():
                model(batch).backward()
        optimizer.zero_grad()


@script
def clipped_by_torch(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:
        session.weight(len(batch[0]))
        model(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        step(optimizer)


@script
def clipped_by_torch_foreach(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    for i, batch in enumerate(batches):
        session.weight(len(batch[0]))
        model(batch).backward()
        order = float("inf") if i % 2 else 1.0
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2, norm_type=order, foreach=False)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=False)
        step(optimizer)


@script
def clipped_by_session(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for i, batch in enumerate(batches):
        session.weight(len(batch[0]))
        model(batch).backward()
        norm = session.clip_grad_norm_(0.2, [2.0, 1.0, float("inf")][i % 3])
        assert norm > 0
        step(optimizer)


@script
def scheduled(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in batches:
        session.weight(len(batch[0]))
        model(batch).backward()
        step(optimizer)
        scheduler.step()
    optimizer.param_groups[0]["lr"] = 0.5
    session.weight(len(batches[0][0]))
    model(batches[0]).backward()
    step(optimizer)


@script
def checkpointed_activations(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    from torch.utils.checkpoint import checkpoint

    for i, (ids, targets) in enumerate(batches):
        session.weight(len(ids))
        rows = model.table(ids).mean(1)
        hidden = checkpoint(model.hidden, rows, use_reentrant=bool(i % 2))
        hidden = checkpoint(model.extra, hidden, use_reentrant=bool(i % 2))
        (hidden.sum(-1) - targets).pow(2).mean().backward()
        step(optimizer)


@script
def evaluated_between(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:
        session.weight(len(batch[0]))
        model(batch).backward()
        step(optimizer)
        model.eval()
        with torch.no_grad():
            assert model(batch).grad_fn is None
            assert not model.weight[torch.tensor([1, 2])].requires_grad
        model.train()


@script
def empty_lookups(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    nothing = torch.empty(0, LENGTH, dtype=torch.int64)
    for batch in batches:
        session.weight(len(batch[0]))
        loss = model(batch) + model.table(nothing).sum() + model.weight[nothing].sum()
        loss.backward()
        step(optimizer)


@script
def gradients_by_autograd_grad(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    """Gradients that the script puts into `.grad` itself are reduced before the step."""
    dense = [p for n, p in model.named_parameters() if n.startswith(("hidden", "extra"))]
    for batch in batches:
        session.weight(len(batch[0]))
        loss = model(batch, extra=True)
        for parameter, gradient in zip(dense, torch.autograd.grad(loss, dense), strict=True):
            parameter.grad = gradient
        step(optimizer)


@script
def weight_zero_counts_for_nothing(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    """A worker may have a batch and give it no weight, whatever comes out of it."""
    for ids, targets in batches:
        session.weight(len(ids))
        if not len(ids):
            ids = torch.full((2, LENGTH), NUM_ROWS - 1)
            targets = torch.full((2,), float("nan"), dtype=torch.float64)
        model((ids, targets)).backward()
        step(optimizer)


@script
def never_zeroed(session: Any, model: Any, optimizer: Any, batches: list[Batch]) -> None:
    """Gradients that nobody zeroes pile up, in tables as elsewhere."""
    for i, batch in enumerate(batches):
        session.weight(len(batch[0]))
        model(batch).backward()
        optimizer.step()
        if i % 5 == 4:
            optimizer.step()
            model.zero_grad()


@script
def regularised_in_a_backward_of_its_own(
    session: Any, model: Any, optimizer: Any, batches: list[Batch]
) -> None:
    """The table is used whole when its rows' gradients are with their owners already."""
    for batch in batches:
        session.weight(len(batch[0]))
        model(batch).backward()
        (0.01 * model.table.weight.pow(2).sum()).backward()
        step(optimizer)
