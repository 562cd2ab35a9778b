"""What `table.grad` is: a stand-in for gradients that lie with the rows' owners.

`torch.nn.utils.clip_grad_norm_`, `clip_grad_value_`, `GradScaler` and `zero_grad` work on it as on
any gradient, on every worker together; only scalars travel. What needs single elements is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from parallax.errors import WholeTableError
from parallax.tables.table import call_plainly, member_of


class Gradients(Protocol):
    """The gradients of a table's rows."""

    name: str

    def norm(self, order: float) -> Tensor:
        """Over all owners' rows."""

    def apply(self, function: Callable[[Tensor], object]) -> None:
        """Change the gradients of this owner's rows, in place and element by element."""

    def zero(self) -> None:
        """Make them zero, which is not the same as having none."""

    def found_nonfinite(self) -> bool:
        """Whether any owner's gradients have a NaN or an infinity."""


class RowGradient(Tensor):
    """Stands for the gradient of a table; has its logical shape and no elements."""

    rows: Gradients

    @staticmethod
    def of(rows: Gradients, like: Tensor) -> RowGradient:
        hollow = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
        gradient = hollow.expand(like.shape).as_subclass(RowGradient)
        gradient.rows = rows
        return gradient

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = member_of(func)
        if name in _HANDLERS:
            return _HANDLERS[name](func, *args, **kwargs)
        if name in _ELEMENTWISE:
            return _elementwise(func, *args, **kwargs)
        if name in _METADATA or name.startswith("__get__is_"):
            return call_plainly(func, args, kwargs)
        _refuse(args, kwargs, name)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowGradient({self.rows.name!r}, shape={tuple(self.shape)})"


def _refuse(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RowGradient)]
    raise WholeTableError(
        f"{name} needs the whole gradient of {found[0].rows.name!r}, whose rows lie with their "
        "owners. Clipping by norm or value and scaling work; to do more with this gradient keep "
        f"the table whole with Config(routes={{{found[0].rows.name!r}: 'all-reduce'}})"
    )


def _norm(
    func: Callable[..., Any], gradient: Tensor, ord: float = 2.0, *_: Any, **__: Any
) -> Tensor:
    assert isinstance(gradient, RowGradient)
    return gradient.rows.norm(float(ord))


def _foreach_norm(
    func: Callable[..., Any], gradients: Sequence[Tensor], ord: float = 2.0, **_: Any
) -> list[Tensor]:
    return [torch.linalg.vector_norm(gradient, ord) for gradient in gradients]


def _elementwise(func: Callable[..., Any], gradient: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In-place functions that keep zero at zero, so that untouched rows need nothing."""
    assert isinstance(gradient, RowGradient)
    gradient.rows.apply(lambda values: func(values, *args, **kwargs))
    return gradient


def _foreach_elementwise(
    func: Callable[..., Any], gradients: Sequence[Tensor], *args: Any, **kwargs: Any
) -> None:
    single = getattr(Tensor, member_of(func).removeprefix("_foreach_"))
    for gradient in gradients:
        single(gradient, *args, **kwargs)


def _zero(func: Callable[..., Any], gradient: RowGradient) -> RowGradient:
    gradient.rows.zero()
    return gradient


def _unscale(
    func: Callable[..., Any], gradients: Sequence[Tensor], found: Tensor, inverse_scale: Tensor
) -> None:
    """GradScaler: all workers must find the same, so that all skip the same steps."""
    func([g for g in gradients if not isinstance(g, RowGradient)], found, inverse_scale)
    for gradient in gradients:
        if isinstance(gradient, RowGradient):
            if gradient.rows.found_nonfinite():
                found.fill_(1.0)
            gradient.rows.apply(lambda values: values.mul_(inverse_scale.to(values.device)))


def _itself(func: Callable[..., Any], gradient: RowGradient, *_: Any, **__: Any) -> RowGradient:
    return gradient


_ELEMENTWISE = frozenset(("mul_", "div_", "clamp_", "clamp_min_", "clamp_max_"))
_METADATA = frozenset(
    (
        *(
            f"__get__{name}"
            for name in "shape dtype device layout ndim requires_grad grad_fn".split()
        ),
        *"size dim numel is_floating_point is_complex element_size __len__ __hash__".split(),
    )
)
_HANDLERS: dict[str, Callable[..., Any]] = {
    "vector_norm": _norm,
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "_foreach_norm": _foreach_norm,
    "zero_": _zero,
    "_foreach_zero_": _foreach_elementwise,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "detach": _itself,
    "detach_": _itself,
    "requires_grad_": _itself,
    **{f"_foreach_{name}": _foreach_elementwise for name in _ELEMENTWISE},
}
