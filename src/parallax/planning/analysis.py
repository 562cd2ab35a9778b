"""What each parameter of a model is used for, as far as its modules show."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from parallax.errors import UnsupportedError


class Kind(enum.Enum):
    """The use of a parameter, as its modules show it."""

    EMBEDDING = "held by embedding modules only"
    TIED = "held by an embedding and by another module"
    UNKNOWN = "its use shows only in the forward pass"
    DENSE = "held by a module that uses it whole"


_WHOLE_MODULES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Bilinear,
    nn.PReLU,
)
"""Modules of torch that never look rows up. `nn.Linear` is not among them: sampled softmaxes
look up rows of its weight."""


_MIN_LINEAR_ROWS = 1024
"""Below this, a linear layer's weight is not worth observing."""


@dataclass(frozen=True)
class Facts:
    """What the plan needs to know of a parameter."""

    name: str
    parameter: nn.Parameter
    kind: Kind
    holders: tuple[str, ...]
    """The modules that hold it, as "name (class)"."""
    asks_sparse: bool
    """Some embedding that holds it has `sparse=True`."""
    padding_rows: tuple[int, ...] = ()
    """Rows that its embeddings keep at zero from the start."""
    has_hooks: bool = False
    """The script has registered hooks on its gradient."""

    @property
    def may_be_table(self) -> bool:
        """Whether only rows of it may be used: its modules do not say that it is used whole."""
        return self.kind in (Kind.EMBEDDING, Kind.UNKNOWN)

    @property
    def size_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


def analyse(model: nn.Module) -> list[Facts]:
    """Return an entry for each distinct parameter, in the order of `named_parameters()`."""
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module_name, module, attribute))
    return [
        _facts(name, parameter, holders[id(parameter)])
        for name, parameter in model.named_parameters()
    ]


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse options of embeddings whose effect depends on the ids of all workers."""
    for name, module in _embeddings(model):
        if module.max_norm is not None:
            raise UnsupportedError(
                f"embedding {name!r} has max_norm={module.max_norm}: its lookups change the "
                "weights, differently on each worker. Leave max_norm out, or clip the rows "
                "yourself after optimizer.step()"
            )
        if module.scale_grad_by_freq:
            raise UnsupportedError(
                f"embedding {name!r} has scale_grad_by_freq=True: the frequency in the joined "
                "batch is not known to one worker. Leave the option out"
            )


def refuse_early_steps(model: nn.Module) -> None:
    """Refuse post-accumulate hooks: they would run before gradients are reduced."""
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"parameter {name!r} has a post-accumulate-grad hook (as for an optimizer step "
                "inside backward), which would run before the workers' gradients are reduced. "
                "Step after backward instead"
            )


def _embeddings(model: nn.Module) -> Iterable[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield name, module


def _facts(name: str, parameter: nn.Parameter, holders: list[tuple[str, nn.Module, str]]) -> Facts:
    modules = [module for _, module, _ in holders]
    embeddings = [
        module
        for _, module, attribute in holders
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and attribute == "weight"
    ]
    return Facts(
        name=name,
        parameter=parameter,
        kind=_kind(parameter, modules, len(embeddings)),
        holders=tuple(f"{module or 'the model'} ({type(m).__name__})" for module, m, _ in holders),
        asks_sparse=any(m.sparse for m in embeddings),
        padding_rows=tuple({m.padding_idx for m in embeddings if m.padding_idx is not None}),
        has_hooks=bool(parameter._backward_hooks),
    )


def _kind(parameter: nn.Parameter, modules: list[nn.Module], num_embeddings: int) -> Kind:
    if num_embeddings == len(modules):
        return Kind.EMBEDDING
    if num_embeddings:
        return Kind.TIED
    if parameter.dim() == 0 or not parameter.is_floating_point():
        return Kind.DENSE
    looks_whole = any(
        isinstance(module, _WHOLE_MODULES)
        or (isinstance(module, nn.Linear) and len(parameter) < _MIN_LINEAR_ROWS)
        for module in modules
    )
    return Kind.DENSE if looks_whole else Kind.UNKNOWN
