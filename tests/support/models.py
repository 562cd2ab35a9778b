"""Small models that use tables in every way there is, and the optimizers that train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_ROWS, WIDTH, LENGTH = 40, 6, 3
Batch = tuple[Tensor, Tensor]


def make_batches(
    num_steps: int = 20, size: int = 12, dtype: torch.dtype = torch.float32, seed: int = 1
) -> list[Batch]:
    """Ids with many repeats (and the padding row 0) and targets."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_steps):
        skewed = torch.rand(size, LENGTH, generator=generator, dtype=torch.float64) ** 3
        ids = (skewed * NUM_ROWS).long()
        targets = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        batches.append((ids, targets))
    return batches


class Lookup(nn.Module):
    """One table, used in the way that `form` names, before a dense layer."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.out = nn.Linear(WIDTH, 1)
        make = _TABLES.get(form.split("/")[0])
        if make is not None:
            self.table = make()
        else:
            self.weight = nn.Parameter(torch.randn(NUM_ROWS, WIDTH))
        if form == "tied":
            self.back = nn.Linear(WIDTH, NUM_ROWS, bias=False)
            self.back.weight = self.table.weight
        if form == "one-dim":
            self.weight = nn.Parameter(torch.randn(NUM_ROWS))

    def forward(self, batch: Batch) -> Tensor:
        ids, targets = batch
        hidden, extra = _FORMS[self.form](self, ids)
        loss = (torch.tanh(self.out(hidden)).squeeze(-1) - targets).pow(2).mean()
        return loss + extra

    @property
    def table_name(self) -> str:
        return "table.weight" if hasattr(self, "table") else "weight"


def _embedding(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(NUM_ROWS, WIDTH, **options)  # type: ignore[arg-type]


def _bag(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(NUM_ROWS, WIDTH, **options)  # type: ignore[arg-type]


_TABLES: dict[str, Callable[[], nn.Module]] = {
    "embedding": _embedding(),
    "sparse": _embedding(sparse=True),
    "padding": _embedding(padding_idx=0),
    "sparse-padding": _embedding(padding_idx=0, sparse=True),
    "negative-padding": _embedding(padding_idx=-NUM_ROWS),
    "pretrained": lambda: nn.Embedding.from_pretrained(torch.randn(NUM_ROWS, WIDTH), freeze=False),
    # Its padding row is not zero, so that decay of that row would show.
    "pretrained-padding": lambda: nn.Embedding.from_pretrained(
        torch.randn(NUM_ROWS, WIDTH), freeze=False, padding_idx=0
    ),
    "frozen": lambda: nn.Embedding.from_pretrained(torch.randn(NUM_ROWS, WIDTH)),
    "twice": _embedding(),
    "int32": _embedding(),
    "bag-sum": _bag(mode="sum"),
    "bag-mean": _bag(mode="mean"),
    "bag-max": _bag(mode="max"),
    "bag-padding": _bag(mode="mean", padding_idx=0),
    "bag-offsets": _bag(mode="mean"),
    "bag-last-offset": _bag(mode="sum", include_last_offset=True),
    "bag-weights": _bag(mode="sum"),
    "bag-sparse": _bag(mode="sum", sparse=True),
    "tied": _embedding(),
    "tied-in-forward": _embedding(),
    "regularised": _embedding(),
    "squared": _embedding(),
    "copied": _embedding(),
    "returned": _embedding(),
    "function": _embedding(),
}

Form = Callable[[Lookup, Tensor], tuple[Tensor, Tensor]]


class Squares(torch.autograd.Function):
    """An operation of a script's own: no `__torch_function__` sees what is given to it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.pow(2).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return gradient * weight * (2 / weight.numel())


class _First(torch.autograd.Function):
    """The first rows of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return weight[:LENGTH].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        whole = gradient.new_zeros(ctx.shape)
        whole[:LENGTH] = gradient
        return whole


def _none() -> Tensor:
    return torch.zeros(())


def _mean(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.mean(1), _none()


def _offsets(ids: Tensor, last: bool = False) -> Tensor:
    return torch.arange(len(ids) + int(last)) * LENGTH


def _tied(model: Lookup, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    extra = F.cross_entropy(logits, ids[:, 0]) if len(ids) else logits.sum()
    return model.table(ids).mean(1), extra


def _several(model: Lookup, ids: Tensor) -> tuple[Tensor, Tensor]:
    first = F.embedding(ids, model.weight)
    shifted = F.embedding((ids + 1) % NUM_ROWS, model.weight)
    third = model.weight[ids[:, :1]]
    return first.mean(1) + shifted.sum(1) + third.squeeze(1), _none()


_FORMS: dict[str, Form] = {
    **{
        form: lambda m, ids: _mean(m.table(ids))
        for form in (
            "embedding sparse padding sparse-padding negative-padding pretrained "
            "pretrained-padding frozen".split()
        )
    },
    "twice": lambda m, ids: _mean(m.table(ids) * m.table(ids.flip(1) % 7)),
    "int32": lambda m, ids: _mean(m.table(ids.int())),
    **{
        form: lambda m, ids: (m.table(ids), _none())
        for form in "bag-sum bag-mean bag-max bag-padding bag-sparse".split()
    },
    "bag-offsets": lambda m, ids: (m.table(ids.reshape(-1), _offsets(ids)), _none()),
    "bag-last-offset": lambda m, ids: (m.table(ids.reshape(-1), _offsets(ids, True)), _none()),
    "bag-weights": lambda m, ids: (
        m.table(ids, per_sample_weights=torch.sin(ids.to(m.table.weight.dtype))),
        _none(),
    ),
    "f-embedding": lambda m, ids: _mean(F.embedding(ids, m.weight)),
    "f-embedding-sparse": lambda m, ids: _mean(F.embedding(ids, m.weight, sparse=True)),
    "f-embedding-bag": lambda m, ids: (F.embedding_bag(ids, m.weight, mode="sum"), _none()),
    "getitem": lambda m, ids: _mean(m.weight[ids]),
    "getitem-negative": lambda m, ids: _mean(m.weight[ids - NUM_ROWS]),
    "getitem-nested-list": lambda m, ids: (
        m.weight[ids].mean(1),
        m.weight[[[0, 1, 2], [3, 2, 1]]].pow(2).sum(),
    ),
    "getitem-tuple": lambda m, ids: _mean(m.weight[ids, :]),
    "index-select": lambda m, ids: _mean(
        m.weight.index_select(0, ids.reshape(-1)).reshape(*ids.shape, WIDTH)
    ),
    "torch-index-select": lambda m, ids: _mean(
        torch.index_select(m.weight, 0, ids.reshape(-1)).reshape(*ids.shape, WIDTH)
    ),
    "several": _several,
    "one-dim": lambda m, ids: (m.weight[ids].mean(1, keepdim=True).expand(-1, WIDTH), _none()),
    "tied": lambda m, ids: _tied(m, ids, m.back(m.table(ids[:, 1]))),
    "tied-in-forward": lambda m, ids: _tied(m, ids, F.linear(m.table(ids[:, 1]), m.table.weight)),
    "regularised": lambda m, ids: (m.table(ids).mean(1), m.table.weight.pow(2).mean()),
    "squared": lambda m, ids: (m.table(ids).mean(1), (m.table.weight * m.table.weight).mean()),
    "copied": lambda m, ids: (m.table(ids).mean(1), _copied(m).pow(2).mean()),
    "returned": lambda m, ids: (m.table(ids).mean(1), _handed(m).norm() * 0.1),
    "function": lambda m, ids: (m.table(ids).mean(1), Squares.apply(m.table.weight)),  # type: ignore[no-untyped-call]
    "bare-function": lambda m, ids: (m.weight[ids].mean(1), Squares.apply(m.weight)),  # type: ignore[no-untyped-call]
    "function-only": lambda m, ids: (
        ids.to(m.weight.dtype) @ _First.apply(m.weight) / NUM_ROWS,
        _none(),
    ),  # type: ignore[no-untyped-call]
}


def _copied(model: Lookup) -> Tensor:
    weight = model.table.weight
    return torch.empty(tuple(weight.shape), dtype=weight.dtype).copy_(weight)


def _handed(model: Lookup) -> Tensor:
    return model.table.weight  # type: ignore[no-any-return]


WHOLE_FORMS = (
    "tied tied-in-forward regularised squared copied returned getitem-nested-list bare-function "
    "function-only".split()
)
ROW_FORMS = [form for form in _FORMS if form not in ("frozen", *WHOLE_FORMS)]

Parameters = Iterable[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adagrad-lr-decay": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "adagrad-decay": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
EXACT = ["sgd", "adagrad", "adagrad-lr-decay"]
"""They leave rows without a gradient alone."""
LAZY = [name for name in OPTIMIZERS if name not in (*EXACT, "rprop")]
"""They change every row, and can be told not to."""
