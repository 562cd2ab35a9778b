"""One table as the model and the rest of the engine see it: its rows, its gradient, its route."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.comm.compression import is_packed, packed, unpacked
from parallax.comm.error_feedback import ErrorFeedback
from parallax.comm.header import Verb
from parallax.comm.peers import Peers
from parallax.errors import ConfigError, ParallaxError
from parallax.tables.gradient import RowGradient
from parallax.tables.group import TableGroup
from parallax.tables.rowmap import MAX_ROWS, RowMap
from parallax.tables.table import (
    empty_out,
    make_plain,
    make_table,
    set_data,
    take_plain_grad,
)


class Home(enum.Enum):
    """Where a table's rows are."""

    PARAMETER = "every worker has all rows, until it is known how the table is used"
    SHARDS = "each worker has the rows that it owns"
    LEAVING = "every worker has all rows again since this step; lookups may be under way"
    DENSE = "every worker has all rows, and the parameter is an ordinary one"


class Steps(Protocol):
    """The step that is under way, as tables reach it."""

    def lookup(
        self, table: SparseTable, ids: Tensor, padding: int | None, wraps: bool
    ) -> tuple[Tensor, Tensor, int | None]:
        """Return distinct rows, the place of each id among them, and the padding row's place."""

    def embed(self, table: SparseTable, ids: Tensor, padding: int | None, wraps: bool) -> Tensor:
        """Return the row of each id, as `F.embedding` does."""

    def deliver_dense(self, table: SparseTable, gradient: Tensor) -> None:
        """Take a gradient of all rows."""

    def begin_backward(self) -> float:
        """A gradient has come; return the scale of this backward."""

    def rows_changed(self, table: SparseTable) -> None:
        """All rows have new values, on all workers."""

    def drop_gradients(self, table: SparseTable) -> None:
        """Forget the gradients that were not reduced yet."""

    touched: set[str]
    """Names of tables that got a gradient here since the last reduction."""

    def densify(self, table: SparseTable, why: str, *, is_planned: bool) -> None:
        """Make the table an ordinary parameter."""


class HasStep(Protocol):
    @property
    def step(self) -> Steps:
        """The step that is under way."""


class SparseTable:
    """A parameter of which only rows are used. `Rows` and `Gradients` of tables/ are its views."""

    def __init__(self, name: str, parameter: nn.Parameter, peers: Peers, engine: HasStep) -> None:
        self.name = name
        self.parameter = parameter
        self.row_map = _row_map(name, parameter.shape[0], peers.num_workers)
        self.home = Home.PARAMETER
        self.group: TableGroup | None = None
        self.number = -1
        """Of this table in its group."""
        self.error_feedback: ErrorFeedback | None = None
        """Of compressed pushes."""
        self.anchor = torch.zeros((), requires_grad=True, device=parameter.device)
        self._peers = peers
        self._engine = engine
        self.is_gathered = True
        """Its lookups want the rows of their ids, no more. See [Note: gather] in batch.py."""
        self.needs_gradient = parameter.requires_grad
        self._stand_in: RowGradient | None = None
        self._handle: Any = None
        self._has_warned = False
        if not parameter.is_meta:  # Else when it is placed: it has other hooks then.
            self._catch_gradients()
        make_table(parameter, self)

    # As the model sees it -----------------------------------------------------------------

    @property
    def shard(self) -> Tensor | None:
        """This owner's rows; None while the parameter has them all."""
        return None if self.group is None else self.group.shard(self.number)

    @property
    def local(self) -> bool:
        return self.group is None or self._peers.num_workers == 1

    def lookup(
        self, ids: Tensor, padding: int | None, wraps: bool
    ) -> tuple[Tensor, Tensor, int | None]:
        return self._engine.step.lookup(self, ids, padding, wraps)

    def embed(self, ids: Tensor, padding: int | None, wraps: bool) -> Tensor:
        return self._engine.step.embed(self, ids, padding, wraps)

    def values(self, why: str) -> Tensor:
        """Return all rows in the order of ids. Collective if they lie in shards."""
        if self.group is None:
            with torch._C.DisableTorchFunctionSubclass():
                return self.parameter.detach()
        return self.gathered(self.group.shard(self.number), why)

    def become_whole(self, why: str) -> None:
        self._engine.step.densify(self, why, is_planned=False)

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        if values.shape != self.parameter.shape:
            raise ValueError(
                f"table {self.name!r} has shape {tuple(self.parameter.shape)}, "
                f"but the values have {tuple(values.shape)}"
            )
        self.replaced()
        shard = self.shard
        if shard is None:
            self.values("copy_").copy_(values)
        else:
            shard.copy_(self.own_part(values))

    def replaced(self) -> None:
        """All rows may have changed, on every worker."""
        self._engine.step.rows_changed(self)

    # Placement ----------------------------------------------------------------------------

    def enter(self, group: TableGroup, number: int) -> None:
        """Keep only this owner's rows from now on; they are in the group already."""
        self.group, self.number, self.home = group, number, Home.SHARDS
        empty_out(self.parameter, group.rows.device)
        make_table(self.parameter, self)
        if self._handle is None:
            self._catch_gradients()

    def regroup(self, group: TableGroup, number: int) -> None:
        """The rows have moved to another storage."""
        self.group, self.number = group, number

    def leave(self, values: Tensor | None, gradient: Tensor | None) -> None:
        """Make the parameter an ordinary one: with these values, or with those that it has."""
        make_plain(self.parameter)
        if values is not None:
            set_data(self.parameter, values)
            self.parameter.grad = gradient
        self.group = self.error_feedback = None
        self.home = Home.LEAVING
        self.release()

    def release(self) -> None:
        """Leave the parameter alone from now on."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def own_part(self, whole: Tensor) -> Tensor:
        return self.row_map.part(whole, self._peers.rank)

    def gathered(self, part: Tensor, why: str) -> Tensor:
        """Return all workers' parts (of rows, or of an optimizer's state) as one tensor, on each.
        Collective."""
        peers = self._peers
        if peers.num_workers == 1:
            return part
        operation = peers.operation(Verb.GATHER, self.name)
        peers.announce(operation)
        parts = part.new_empty((self.row_map.num_rows, *part.shape[1:]))
        with peers.waiting(f"{operation} for {why}"):
            for owner in range(peers.num_workers):
                rows = parts[self.row_map.first(owner) :][: self.row_map.size_of(owner)]
                if owner == peers.rank:
                    rows.copy_(part)
                peers.spread(rows, owner)
        return self.row_map.whole(parts)

    def collected(self, part: Tensor) -> Tensor | None:
        """Return all workers' parts as one tensor on rank 0, and None elsewhere. Collective."""
        peers = self._peers
        if peers.num_workers == 1:
            return part
        sizes = [self.row_map.size_of(owner) for owner in range(peers.num_workers)]
        nothing = [0] * (peers.num_workers - 1)
        operation = peers.operation(Verb.GATHER, self.name)
        peers.announce(operation)
        with peers.waiting(operation):
            received = sizes if peers.rank == 0 else [0] * peers.num_workers
            rows = peers.exchange(part.contiguous(), [len(part), *nothing], received)
        return self.row_map.whole(rows) if peers.rank == 0 else None

    # Gradients ----------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        """Some worker had a gradient in this step; the same on all workers."""
        return self.group is not None and self.number in self.group.graded

    @property
    def received(self) -> tuple[Tensor, Tensor] | None:
        """Summed gradients of this owner's rows: places in the shard, and values."""
        return None if self.group is None else self.group.gradient_of(self.number)

    @property
    def gradient(self) -> Tensor | None:
        group = self.group
        is_graded = group is not None and self.number in group.graded
        if not is_graded and self.name not in self._engine.step.touched:
            return None
        if self._stand_in is None:
            self._stand_in = RowGradient.of(self, self.parameter)
        return self._stand_in

    def set_gradient(self, value: Tensor | None) -> None:
        if value is None:
            group = self.group
            if self.name in self._engine.step.touched:
                self._engine.step.drop_gradients(self)
            if group is not None and self.number in group.graded:
                group.drop(self.number)
        elif not (isinstance(value, RowGradient) and value.rows is self):
            raise ParallaxError(
                f"the gradient of table {self.name!r} can be set to None only: its rows lie with "
                f"their owners. Keep it whole with Config(routes={{{self.name!r}: 'all-reduce'}})"
            )

    def zero(self) -> None:
        """Make the gradient zero. The optimizer steps with it, as in torch."""
        step = self._engine.step
        if self.name in step.touched:
            step.drop_gradients(self)
            step.touched.add(self.name)
        if self.has_gradient and self.group is not None:
            self.group.zero(self.number)

    def norm(self, order: float) -> Tensor:
        self._check_reduced()
        power = self.norm_power(order)
        reduction = dist.ReduceOp.MAX if order == float("inf") else dist.ReduceOp.SUM
        self._peers.total(power, reduction, f"the norm of the gradient of {self.name!r}")
        return norm_of_power(power, order).to(self.parameter.device, self.parameter.dtype)

    def norm_power(self, order: float) -> Tensor:
        """Return this owner's addend to the norm: Σ|x|^p, or max|x| for the infinite norm."""
        received = self.received
        return power_of(None if received is None else received[1], order)

    def apply(self, function: Callable[[Tensor], object]) -> None:
        self._check_reduced()
        received = self.received
        if received is not None:
            function(received[1])

    def found_nonfinite(self) -> bool:
        self._check_reduced()
        received = self.received
        bad = received is not None and not bool(received[1].isfinite().all())
        flag = torch.tensor([bad], dtype=torch.int64)
        self._peers.total(flag, dist.ReduceOp.MAX, f"looking for infinities in {self.name!r}")
        return bool(flag.item())

    def dense_gradient(self, slots: Tensor, values: Tensor) -> Tensor:
        """Return gradients of some rows as one of all rows."""
        whole = torch.zeros(self.parameter.shape, dtype=values.dtype, device=values.device)
        return whole.index_add_(0, self.row_map.ids(slots), values)

    # Compression --------------------------------------------------------------------------

    @property
    def rounds(self) -> bool:
        """Whether its gradients travel in fewer bits."""
        return self._peers.num_workers > 1 and is_packed(self.parameter, self._peers.row_format)

    def rounded(self, slots: Tensor, values: Tensor) -> Tensor:
        """Return gradients as they are sent, with the rounding errors of earlier pushes added. See
        [Note: compression]."""
        row_format = self._peers.row_format
        if self.error_feedback is None:
            self.error_feedback = self.new_error_feedback()
        ids = self.row_map.ids(slots)
        values = values + self.error_feedback.lookup(ids)
        sent = packed(values, row_format)
        # NaN and infinities go to the owner and are not stored.
        errors = (values - unpacked(sent, values, row_format)).nan_to_num_(0.0, 0.0, 0.0)
        self.error_feedback.store(ids, errors)
        return sent

    def new_error_feedback(self) -> ErrorFeedback:
        return ErrorFeedback(self.parameter, self.row_map.largest)

    # Inside -------------------------------------------------------------------------------

    def _check_reduced(self) -> None:
        """See that all gradients are with their owners, where each reduction brings them."""
        if self.name in self._engine.step.touched:
            raise ParallaxError(
                f"the gradient of table {self.name!r} is accumulated under no_sync() and not "
                "reduced yet: run the last backward outside of it, or use session.clip_grad_norm_"
            )

    def _catch_gradients(self) -> None:
        """See gradients that autograd gives to the parameter itself, past its lookups."""
        with torch._C.DisableTorchFunctionSubclass():
            needs = self.parameter.requires_grad
            self.parameter.requires_grad_(True)  # A frozen one has hooks too, for later.
            self._handle = self.parameter.register_post_accumulate_grad_hook(self._caught)
            self.parameter.requires_grad_(needs)

    @torch.no_grad()
    def _caught(self, parameter: Tensor) -> None:
        """A gradient of all rows has come: of an autograd function of the script's own, which takes
        parameters past `__torch_function__`, or of a forward from before this was a table.
        """
        gradient = take_plain_grad(parameter)
        if self.group is not None:
            if not self._has_warned:
                self._has_warned = True
                _warn_whole_gradient(self.name)
            self._engine.step.deliver_dense(self, gradient)
            return
        scale = self._engine.step.begin_backward()
        self.become_whole("an autograd function")
        # A worker without samples may have NaN here.
        parameter.grad = torch.zeros_like(gradient) if scale == 0 else gradient * scale


def _row_map(name: str, num_rows: int, num_workers: int) -> RowMap:
    if num_rows > MAX_ROWS:
        raise ConfigError(
            f"table {name!r} has {num_rows} rows, but a sharded table can have up to {MAX_ROWS} "
            f"(2³¹ - 1). Split it, or keep it whole with Config(routes={{{name!r}: 'all-reduce'}})"
        )
    if num_workers == 1:
        # In the order of ids: the shard stands for the parameter's own memory. See `values`.
        return RowMap(num_rows, (0, num_rows), multiplier=1)
    return RowMap.even(num_rows, num_workers)


def power_of(values: Tensor | None, order: float) -> Tensor:
    if values is None or not values.numel():
        return torch.zeros((), dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(values, order)
    norm = norm.to("cpu", torch.float64)
    return norm if order == float("inf") else norm**order


def norm_of_power(power: Tensor, order: float) -> Tensor:
    return power if order == float("inf") else power ** (1.0 / order)


def warn_whole(name: str, why: str) -> None:
    warnings.warn(
        f"parameter {name!r} is used whole (by {why}), so it is all-reduced, not sharded. "
        "If that use is not meant, look its rows up instead",
        stacklevel=2,
    )


def _warn_whole_gradient(name: str) -> None:
    warnings.warn(
        f"table {name!r} got a whole gradient, as an autograd function of a script's own gives it. "
        "That is exact, but moves all rows that are not zero. If it is so in every step, keep it "
        f"whole with Config(routes={{{name!r}: 'all-reduce'}})",
        stacklevel=2,
    )
