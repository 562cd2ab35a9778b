"""The row-sparse parameter as the model sees it.

A `Table` is the user's own Parameter object with another class: it keeps its identity (in the
module, the optimizer, anywhere), its logical shape and its place, but its rows lie in shards.
Lookups are answered with the rows they touch. An operation that needs the whole table turns it
into an ordinary parameter again. What slips past `__torch_function__` sees NaN, never stale rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from parallax.errors import UnsupportedError, WholeTableError


class Rows(Protocol):
    """What stands behind a table: where its rows are, and where their gradients go."""

    name: str
    needs_gradient: bool
    """As the parameter's `requires_grad`, which lookups would read through `__torch_function__`."""

    @property
    def gradient(self) -> Tensor | None:
        """What `.grad` is."""

    def set_gradient(self, value: Tensor | None) -> None:
        """Set `.grad`, to None or to what it is."""

    @property
    def local(self) -> bool:
        """All rows lie in the parameter itself."""

    def lookup(
        self, ids: Tensor, padding: int | None, wraps: bool
    ) -> tuple[Tensor, Tensor, int | None]:
        """The distinct rows, the place of each id among them, and the padding row's place."""

    def embed(self, ids: Tensor, padding: int | None, wraps: bool) -> Tensor:
        """The row of each id, as `F.embedding` returns them."""

    def values(self, why: str) -> Tensor:
        """All rows, without gradient."""

    def become_whole(self, why: str) -> None:
        """Turn the table into an ordinary parameter."""

    def assign(self, values: Tensor) -> None:
        """Take new values for all rows."""


def _set_grad(table: Table, gradient: Tensor | None) -> None:
    table.rows.set_gradient(gradient)


class Table(nn.Parameter):
    """A parameter of which only rows are used."""

    rows: Rows
    # `zero_grad` reads and sets it for each table, which by way of `__torch_function__` takes long.
    grad = property(attrgetter("rows.gradient"), _set_grad)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        member = member_of(func)
        if member in _METADATA:
            return call_plainly(func, args, kwargs)
        if member.startswith(("__get__", "__set__")) and member not in _VALUES:
            return _attribute(member, func, args, kwargs)
        return _whole(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Table({self.rows.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        if self.rows.local:
            copied = nn.Parameter(self.rows.values("deepcopy").clone(), self.requires_grad)
            return memo.setdefault(id(self), copied)  # type: ignore[return-value]
        _refuse(self, "copying it")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse(self, "pickling it")


def make_table(parameter: nn.Parameter, rows: Rows) -> None:
    """Turn a parameter into a table, in place; its data stay where they are."""
    parameter.__class__ = Table
    parameter.rows = rows  # type: ignore[attr-defined]


def make_plain(parameter: nn.Parameter) -> None:
    """Turn a table into an ordinary parameter again, in place."""
    parameter.__class__ = nn.Parameter
    if "rows" in parameter.__dict__:
        del parameter.__dict__["rows"]


def empty_out(parameter: nn.Parameter, device: torch.device) -> None:
    """Keep a parameter's logical shape, but give back its memory."""
    hollow = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
    set_data(parameter, hollow.expand(parameter.shape))


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        if data.device.type != parameter.device.type:
            # Autograd does not let `.data` change the device type; a swap of contents does.
            fresh = nn.Parameter(data, parameter.requires_grad)
            fresh.__class__ = type(parameter)
            fresh.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, fresh)
        else:
            parameter.data = data


def take_plain_grad(parameter: Tensor) -> Tensor:
    """Take away the gradient that autograd gave to a table's parameter itself."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor = Tensor.grad.__get__(parameter)  # type: ignore[union-attr]
        Tensor.grad.__set__(parameter, None)  # type: ignore[union-attr]
    return gradient


# Lookups ----------------------------------------------------------------------------------


def _embedding(
    input: Tensor,
    weight: Table,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm or scale_grad_by_freq:
        _check_options(weight, max_norm, scale_grad_by_freq)
    padding = None if padding_idx is None else _padding_row(weight, padding_idx)
    return weight.rows.embed(input, padding, False)


def _embedding_bag(
    input: Tensor,
    weight: Table,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    if max_norm or scale_grad_by_freq:
        _check_options(weight, max_norm, scale_grad_by_freq)
    padding = None if padding_idx is None else _padding_row(weight, padding_idx)
    rows, places, padding = weight.rows.lookup(input, padding, False)
    return F.embedding_bag(
        places.to(input.dtype),
        rows,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


def _index_select(input: Table, dim: int, index: Tensor) -> Tensor:
    if dim not in (0, -input.dim()) or not isinstance(input, Table):
        return _whole(torch.index_select, (input, dim, index), {})  # type: ignore[no-any-return]
    return input.rows.embed(index, None, False)


def _getitem(table: Table, index: Any) -> Tensor:
    first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    ids = _ids_in(first)
    if ids is None or len(rest) >= table.dim() or not all(map(_takes_all, rest)):
        return _whole(Tensor.__getitem__, (table, index), {})  # type: ignore[no-any-return]
    return table.rows.embed(ids.to(table.device), None, True)


def _takes_all(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _ids_in(index: Any) -> Tensor | None:
    """The rows that an index names one by one; None for slices, masks and the like."""
    if isinstance(index, int) and not isinstance(index, bool):
        return torch.tensor(index)
    if isinstance(index, list):
        # torch reads a nested list as a tuple of indices, so only flat ones name rows.
        flat = bool(index) and all(type(each) is int for each in index)
        return torch.tensor(index) if flat else None
    if type(index).__module__ == "numpy":
        index = torch.as_tensor(index)
    if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32, torch.int16):
        return index
    return None


def _check_options(table: Table, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    for option, given in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq)):
        if given:
            raise UnsupportedError(
                f"a lookup of table {table.rows.name!r} has {option}={given}, whose effect depends "
                f"on all workers' ids. Leave the option out, or keep the table whole with "
                f"Config(routes={{{table.rows.name!r}: 'all-reduce'}})"
            )


def _padding_row(table: Table, padding_idx: int) -> int:
    num_rows = table.shape[0]
    if not -num_rows <= padding_idx < num_rows:
        raise IndexError(
            f"padding_idx {padding_idx} is outside table {table.rows.name!r} of {num_rows} rows"
        )
    return padding_idx % num_rows


# Everything else --------------------------------------------------------------------------


def call_plainly(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _attribute(
    member: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Read or set an attribute that is not among those that the table knows. Local.

    Attributes are metadata unless they are in `_VALUES`, and metadata must not cost a collective.
    """
    table, name = args[0], member.removeprefix("__get__").removeprefix("__set__")
    if not isinstance(table, Table):  # A table is the value that an ordinary tensor is given.
        return _whole(func, args, kwargs)
    if member.startswith("__set__") or name == "data":
        if not table.rows.local:
            _refuse(table, f"{'reading' if member.startswith('__get__') else 'setting'} .{name}")
        return _whole(func, args, kwargs)
    found = call_plainly(func, args, kwargs)
    if isinstance(found, Tensor):  # Its values would be those of the empty parameter.
        _refuse(table, f"reading .{name}")
    return found


def _whole(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Answer an operation that needs all rows."""
    leaves = pytree.tree_leaves((args, kwargs))
    tables = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Table)}.values()
    why = _label(func)
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        for table in tables:
            table.rows.become_whole(why)
        return func(*args, **kwargs)
    written = [kwargs.get("out"), args[0] if args and _modifies(func) else None]
    for target in pytree.tree_leaves(written):
        if isinstance(target, Table) and not target.rows.local:
            _refuse(target, f"changing it by {why}")
    args, kwargs = pytree.tree_map_only(Table, lambda t: t.rows.values(why), (args, kwargs))
    return func(*args, **kwargs)


def _detach(table: Table) -> Tensor:
    if not table.rows.local:
        _refuse(table, "model.state_dict() or detach()")
    return table.rows.values("detach")


def _copy(table: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(table, Table):
        return _whole(Tensor.copy_, (table, source), {})  # type: ignore[no-any-return]
    table.rows.assign(source)
    return table


def _moved(table: Tensor, other: Tensor) -> bool:
    """`model.to()`, `model.double()` and alike ask this before they set `.data`."""
    if isinstance(table, Table) and not table.rows.local:
        _refuse(table, "moving or casting the model")
    return True


def _refuse_partial_gradient(*args: Any, **kwargs: Any) -> NoReturn:
    """`autograd.grad` and `backward(inputs=…)` would leave the rows' gradients out."""
    leaves = pytree.tree_leaves((args, kwargs))
    table = next(leaf for leaf in leaves if isinstance(leaf, Table))
    raise UnsupportedError(
        f"gradients with respect to table {table.rows.name!r} cannot be asked for one by one: they "
        "lie with the rows' owners. Call loss.backward() without inputs, or keep the table whole "
        f"with Config(routes={{{table.rows.name!r}: 'all-reduce'}})"
    )


def _set_data(table: Table, data: Tensor) -> None:
    alike = (data.shape, data.dtype, data.device) == (table.shape, table.dtype, table.device)
    if not alike or not table.rows.local:
        _refuse(table, "setting .data")
    table.rows.assign(data)


def _set_requires_grad(table: Table, needs: bool = True) -> Table:
    with torch._C.DisableTorchFunctionSubclass():
        table.requires_grad_(needs)
    table.rows.needs_gradient = needs
    return table


def _refuse(table: Table, what: str) -> NoReturn:
    raise WholeTableError(
        f"{what} needs all rows of {table.rows.name!r}, which is sharded over the workers. "
        "session.state_dict() gathers a plain dict on rank 0, session.save() writes a checkpoint; "
        "move, initialise or copy a model before parallelize()"
    )


def member_of(func: Callable[..., Any]) -> str:
    """The name of a method, or of the attribute that a descriptor reads or sets."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        owner = func.__self__  # type: ignore[attr-defined]
        owner = getattr(owner, "fget", None) or owner  # A property is named by its function.
        return f"{name}{getattr(owner, '__name__', '')}"
    return name


def _label(func: Callable[..., Any]) -> str:
    return torch.overrides.resolve_name(func) or member_of(func)


def _modifies(func: Callable[..., Any]) -> bool:
    name = member_of(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith(("__set", "__i")) or name in ("__get__data", "data_ptr")


_ATTRIBUTES = (
    "shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad_fn is_sparse "
    "is_sparse_csr is_cuda is_cpu is_meta is_mps is_xpu is_xla is_quantized is_nested is_mkldnn "
    "is_vulkan is_maia is_ipu is_mtia names _version output_nr retains_grad _backward_hooks _base "
    "_post_accumulate_grad_hooks _grad_fn name grad_dtype"
).split()
_METHODS = (
    "size dim numel nelement stride storage_offset element_size __len__ is_floating_point "
    "is_complex is_contiguous is_pinned is_inference is_shared is_same_size get_device "
    "requires_grad_ is_set_to _is_view has_names __hash__ is_signed ndimension untyped_storage "
    "is_conj is_neg new_zeros new_ones new_empty new_full new_tensor zeros_like ones_like "
    "empty_like full_like rand_like randn_like"
).split()
_METADATA = frozenset(
    [*(f"__get__{name}" for name in _ATTRIBUTES), *_METHODS, "__set__requires_grad"]
)

_VALUES = frozenset(f"__get__{name}" for name in "T mT H mH real imag".split())
"""Attributes that are operations on all rows: autograd records them."""

_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
    Tensor.__getitem__: _getitem,
    Tensor.detach: _detach,
    Tensor.copy_: _copy,
    torch._has_compatible_shallow_copy_type: _moved,
    torch.autograd.grad: _refuse_partial_gradient,
    torch.autograd.backward: _refuse_partial_gradient,
    Tensor.backward: _refuse_partial_gradient,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.grad.__get__: attrgetter("rows.gradient"),  # type: ignore[union-attr]
    Tensor.requires_grad_: _set_requires_grad,
    Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    Tensor.grad.__set__: _set_grad,  # type: ignore[union-attr]
}
