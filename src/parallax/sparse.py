"""The sharded route: a table's lookups, the gradients of its rows, its way back to dense."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallax.errors import ConfigError, ParallaxError
from parallax.exchange.cache import Cache
from parallax.exchange.collective import Parcel, pull
from parallax.exchange.header import Fault, Operation, Verb
from parallax.exchange.neighbours import Neighbours
from parallax.exchange.peers import Peers
from parallax.exchange.request import Guess, LastRequest, Request
from parallax.gradient import RowGradient
from parallax.residue import Residue
from parallax.shard import merged, put_rows
from parallax.table import empty_out, make_plain, make_table, set_data
from parallax.tables.rowmap import MAX_ROWS, RowMap
from parallax.wire import is_packed, packed, unpacked


@dataclass
class Hooks:
    """What the route tells the rest of the session."""

    begin: Callable[[], float]
    """A gradient has come: begin the backward if it has not begun, and say its scale."""
    left: Callable[[TableRows, str, bool], None]
    """A table has become an ordinary parameter, for this reason; whether the plan wanted it."""
    neighbours: Neighbours
    """Who asks together with this worker."""
    looked_up: Callable[[TableRows, object], None] = lambda table, ids: None
    """A lookup that trains has these ids, and nobody foresaw it."""
    requests: LastRequest = field(default_factory=LastRequest)
    """Shared by the tables of a session."""


class TableRows:
    """The rows behind one table: `Rows` for its lookups, `Gradients` for its gradient."""

    def __init__(self, name: str, parameter: nn.Parameter, peers: Peers, hooks: Hooks) -> None:
        self.name = name
        self.parameter = parameter
        self.row_map = _row_map(name, parameter.shape[0], peers.num_workers)
        self.shard: Tensor | None = None
        """This owner's rows; None while the parameter still has them all."""
        self.received: Parcel | None = None
        """Summed gradients of this owner's rows."""
        self.touched = False
        """A gradient came since the last reduction (here)."""
        self.has_gradient = False
        """Some worker had a gradient in this step; the same on all workers."""
        self.used_whole = False
        """It has become an ordinary parameter."""
        self.retired = False
        """… in an earlier step: no lookup of it is under way any more."""
        self.spoiled = False
        """Rows may have changed that no foreseen lookup has asked for; the same on all workers."""
        self._foreseen = False
        """All workers have the rows of this batch's lookups. See [Note: lookahead]."""
        self._is_surprised = False
        """Something of this table was not as foreseen, here. See `was_surprised`."""
        self._guess: tuple[Guess, Tensor] | None = None
        """This batch's only lookup, and its rows."""
        self._is_used = True
        """A lookup took rows that were foreseen for this batch."""
        self._unsettled = False
        """A lookup since the last update was not foreseen."""
        self._is_applied = False
        """An update took the gradient, which is still there."""
        self._num_updates = 0
        self._asked: Tensor | None = None
        self._asked_places: list[Tensor] = []
        self._pending: list[tuple[Tensor, Tensor]] = []
        self.residue: Residue | None = None
        """What is left of the gradients pushed in fewer bits."""
        self._stand_in: RowGradient | None = None
        self._cache = Cache()
        self._peers = peers
        self._hooks = hooks
        self._anchor = torch.zeros((), requires_grad=True, device=parameter.device)
        self._handle: Any = None
        self._has_warned = False
        if not parameter.is_meta:  # Else when it is placed: what it is then has other hooks.
            self._catch_gradients()
        make_table(parameter, self)

    # As the model sees it -----------------------------------------------------------------

    @property
    def local(self) -> bool:
        return self.shard is None or self._peers.num_workers == 1

    def lookup(
        self, ids: Tensor, *, padding: int | None = None, wraps: bool = False
    ) -> tuple[Tensor, Tensor, int | None]:
        trains = torch.is_grad_enabled() and self._needs_gradient()
        guessed = self._guessed(ids) if trains else None
        if guessed is not None:
            request, rows = guessed
        else:
            device = self.parameter.device
            request = self._hooks.requests.of(ids, self.row_map, wraps=wraps, device=device)
            if trains and not self._foreseen:
                self._hooks.looked_up(self, ids)
            rows = self._fetched(request) if trains else self._fetched_without_gradient(request)
        padding_place = self._place_of(padding, request.slots)
        if trains:
            rows = _Delivery.apply(  # type: ignore[no-untyped-call]
                self._anchor, rows, self, request.slots, padding_place, self._num_updates
            )
        return rows, request.places, padding_place

    def values(self, why: str) -> Tensor:
        if self.shard is None:
            with torch._C.DisableTorchFunctionSubclass():
                return self.parameter.detach()
        return self.shard if self.local else self.gathered(self.shard, why)

    def become_whole(self, why: str, *, planned: bool = False) -> None:
        parameter = self.parameter
        if self.shard is not None:
            values, gradient = self.values(why), self._whole_gradient(why)
            make_plain(parameter)
            set_data(parameter, values)
            parameter.grad = gradient
        make_plain(parameter)
        self.used_whole = True
        self.release()
        self._hooks.left(self, why, planned)
        self.shard = self.residue = None
        self._forget_rows()

    def release(self) -> None:
        """Leave the parameter alone from now on."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def become_rows(self) -> None:
        """The opposite, between two steps: keep only this owner's rows again."""
        parameter = self.parameter
        values, gradient = parameter.detach(), parameter.grad
        parameter.grad = None
        make_table(parameter, self)
        self.used_whole = self.retired = False
        self.place(self.own_part(values))
        if gradient is not None:  # It stays until it is zeroed, as in torch.
            part = self.own_part(gradient)
            slots = (part.reshape(len(part), -1) != 0).any(1).nonzero().squeeze(1)
            self.received = Parcel(self.name, self.row_map, slots, part[slots])
            self.has_gradient = self._is_applied = True

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        if values.shape != self.parameter.shape:
            raise ValueError(
                f"table {self.name!r} has shape {tuple(self.parameter.shape)}, "
                f"but the values have {tuple(values.shape)}"
            )
        self.replaced()
        if self.shard is None:
            self.values("copy_").copy_(values)
        else:
            self.shard.copy_(self.row_map.part(values, self._peers.rank))

    # Placement ----------------------------------------------------------------------------

    def place(self, shard: Tensor) -> None:
        """Keep only this owner's rows from now on."""
        self.shard = shard
        self.replaced()
        empty_out(self.parameter, shard.device)
        if self._handle is None:
            self._catch_gradients()

    def own_part(self, whole: Tensor) -> Tensor:
        return self.row_map.part(whole, self._peers.rank)

    def gathered(self, part: Tensor, why: str) -> Tensor:
        """All workers' parts (of rows, or of an optimizer's state) as one tensor, on each."""
        peers = self._peers
        if peers.num_workers == 1:
            return part
        operation = peers.operation(Verb.GATHER, self.name)
        peers.announce(operation)
        whole = part.new_empty((self.row_map.num_rows, *part.shape[1:]))
        with peers.waiting(f"{operation} for {why}"):
            for owner in range(peers.num_workers):
                size = self.row_map.size_of(owner)
                rows = part if owner == peers.rank else part.new_empty((size, *part.shape[1:]))
                peers.spread(rows, owner)
                put_rows(whole, self.row_map.ids_of(owner, whole.device), rows)
        return whole

    def collected(self, part: Tensor) -> Tensor | None:
        """All workers' parts as one tensor on rank 0, and None elsewhere."""
        peers = self._peers
        if peers.num_workers == 1:
            return part
        sizes = [self.row_map.size_of(owner) for owner in range(peers.num_workers)]
        nothing = [0] * (peers.num_workers - 1)
        operation = peers.operation(Verb.GATHER, self.name)
        peers.announce(operation)
        with peers.waiting(operation):
            received = sizes if peers.rank == 0 else [0] * peers.num_workers
            rows = peers.exchange(part, [len(part), *nothing], received)
        if peers.rank != 0:
            return None
        return self.row_map.whole(rows)

    # Gradients ----------------------------------------------------------------------------

    @property
    def gradient(self) -> Tensor | None:
        if not (self.has_gradient or self.touched):
            return None
        if self._stand_in is None:
            self._stand_in = RowGradient.of(self, self.parameter)
        return self._stand_in

    @gradient.setter
    def gradient(self, value: Tensor | None) -> None:
        if isinstance(value, RowGradient) and value.rows is self:
            return
        if value is not None:
            raise ParallaxError(
                f"the gradient of table {self.name!r} can be set to None only: its rows lie with "
                f"their owners. Keep it whole with Config(routes={{{self.name!r}: 'all-reduce'}})"
            )
        self.zero()

    def zero(self) -> None:
        self._is_applied = False
        self._pending.clear()
        self.received = None
        self.touched = self.has_gradient = False

    def norm(self, order: float) -> Tensor:
        self._check_home()
        power = self.norm_power(order)
        reduction = dist.ReduceOp.MAX if order == float("inf") else dist.ReduceOp.SUM
        self._peers.total(power, reduction, f"the norm of the gradient of {self.name!r}")
        return norm_of_power(power, order).to(self.parameter.device, self.parameter.dtype)

    def norm_power(self, order: float) -> Tensor:
        """This owner's addend to the norm: Σ|x|^p, or max|x| for the infinite norm."""
        if self.received is None or not self.received.values.numel():
            return torch.zeros((), dtype=torch.float64)
        norm: Tensor = torch.linalg.vector_norm(self.received.values, order)
        norm = norm.to("cpu", torch.float64)
        return norm if order == float("inf") else norm**order

    def apply(self, function: Callable[[Tensor], object]) -> None:
        self._check_home()
        if self.received is not None:
            function(self.received.values)

    def found_nonfinite(self) -> bool:
        self._check_home()
        values = None if self.received is None else self.received.values
        bad = values is not None and not bool(values.isfinite().all())
        flag = torch.tensor([bad], dtype=torch.int64)
        self._peers.total(flag, dist.ReduceOp.MAX, f"looking for infinities in {self.name!r}")
        return bool(flag.item())

    def deliver(
        self, slots: Tensor, gradient: Tensor, padding_place: int | None, num_updates: int
    ) -> None:
        """Keep the gradient of a lookup's rows until the push. Called by autograd.

        The lookup was made after so many updates; if there were more since, its rows are not among
        those that the next update was expected to change.
        """
        self._is_surprised |= num_updates != self._num_updates
        if self.retired:
            raise ParallaxError(
                f"backward through a lookup of {self.name!r} from before it was used whole in an "
                "earlier step: run the forward again"
            )
        scale = self._hooks.begin()
        self.touched = True
        if scale == 0:  # a worker without samples: its loss may be NaN, and counts for nothing
            return
        if padding_place is not None:
            slots, gradient = _without(slots, padding_place), _without(gradient, padding_place)
        self._pending.append((slots, gradient if scale == 1 else gradient * scale))

    def parcel(self) -> Parcel:
        """Take the gradients that have come here, summed by row."""
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            slots, values = pending[0]
        elif pending:
            slots, values = merged([s for s, _ in pending], [v for _, v in pending])
        else:
            slots = torch.empty(0, dtype=torch.int64, device=self.parameter.device)
            values = self._no_rows()
        return Parcel(self.name, self.row_map, slots, values)

    def rounded(self, parcel: Parcel) -> Parcel:
        """As it travels, with what rounding took from these rows before. See [Note: wire]."""
        wire, values = self._peers.wire, parcel.values
        if not self.rounds:
            return parcel
        if self.residue is None:
            self.residue = self.new_residue()
        ids = self.row_map.ids(parcel.slots)
        values = values + self.residue.of(ids)
        sent = packed(values, wire)
        # What is not finite is told to the owner, not kept.
        rest = (values - unpacked(sent, values, wire)).nan_to_num_(0.0, 0.0, 0.0)
        self.residue.keep(ids, rest)
        return replace(parcel, packed=sent)

    @property
    def rounds(self) -> bool:
        """Whether its gradients travel in fewer bits."""
        return self._peers.num_workers > 1 and is_packed(self.parameter, self._peers.wire)

    def new_residue(self) -> Residue:
        return Residue(self.parameter, self.row_map.largest)

    def receive(self, parcel: Parcel) -> None:
        """Add what the push brought to what this owner has."""
        self.has_gradient = True
        if self.received is not None:
            slots, values = merged(
                [self.received.slots, parcel.slots], [self.received.values, parcel.values]
            )
            parcel = Parcel(self.name, self.row_map, slots, values)
        self.received = parcel

    def dense_gradient(self, parcel: Parcel) -> Tensor | None:
        """The gradients of a parcel as a whole tensor, for a table that has turned dense."""
        if not len(parcel.slots):
            return None
        whole = torch.zeros(
            self.parameter.shape, dtype=parcel.values.dtype, device=parcel.values.device
        )
        return whole.index_add_(0, self.row_map.ids(parcel.slots), parcel.values)

    def _whole_gradient(self, why: str) -> Tensor | None:
        """What earlier backwards of this step brought to the owners, as a dense gradient.

        It is the same on all workers, so that averaging it with what comes now keeps it.
        """
        if not self.has_gradient:
            return None
        assert self.shard is not None
        part = torch.zeros_like(self.shard)
        if self.received is not None:
            put_rows(part, self.received.slots, self.received.values)
        self.received = None
        self.has_gradient = False
        return self.gathered(part, why)

    def updated(self) -> None:
        """The rows have changed. Their gradient stays until it is zeroed, as in torch."""
        self._forget_rows()
        self._num_updates += 1
        # A gradient that is applied again changes rows of an earlier batch once more.
        self.spoiled |= self._is_applied
        self._unsettled, self._is_applied = False, True
        if self._asked is not None:
            for places in self._asked_places:
                self._asked[places] = False
        self._asked_places.clear()

    # Lookahead ----------------------------------------------------------------------------

    def foresee(self, slots: Tensor, rows: Tensor, asked: Tensor, guess: Guess | None) -> None:
        """The rows of this batch's lookups are here; `asked` are those that workers have of us."""
        assert self.shard is not None
        self._cache.put(slots, rows)
        self._guess = None if guess is None else (guess, rows)
        self._foreseen, self._is_used = True, False
        self.spoiled = self._unsettled
        if self._asked is None or len(self._asked) != len(self.shard):
            self._asked = torch.zeros(len(self.shard), dtype=torch.bool, device=self.shard.device)
        self._asked[asked] = True
        self._asked_places.append(asked)

    def is_asked(self, places: Tensor) -> Tensor:
        if self._asked is None:  # No lookup was foreseen yet, so the table is spoiled anyway.
            return torch.ones_like(places, dtype=torch.bool)
        return self._asked[places]

    def close_window(self) -> None:
        """The gradients of this batch are reduced: from now on lookups are collective again."""
        self._foreseen, self._is_used = False, True

    def was_surprised(self) -> bool:
        """Whether something was not as foreseen, here and since this was asked last."""
        surprised, self._is_surprised = self._is_surprised or not self._is_used, False
        return surprised

    def replaced(self) -> None:
        """All rows may have changed, on every worker."""
        self._forget_rows()
        self.spoiled = True

    def surprise(self) -> None:
        """A lookup was not foreseen, on all workers: nobody has noted which rows may change."""
        self.spoiled = self._unsettled = True

    def _forget_rows(self) -> None:
        self._cache.clear()
        self._foreseen, self._guess = False, None

    # Inside -------------------------------------------------------------------------------

    def _needs_gradient(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.requires_grad

    def _check_home(self) -> None:
        """See that all gradients are with their owners, where each reduction brings them."""
        if self.touched:
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
        """A whole gradient has come: of an autograd function of the script's own, which takes
        parameters past `__torch_function__`, or of a forward from before this was a table.
        """
        with torch._C.DisableTorchFunctionSubclass():
            gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self.shard is not None:
            self._deliver_whole(gradient)
            return
        scale = self._hooks.begin()
        self.become_whole("an autograd function")
        # A worker without samples may have NaN here.
        parameter.grad = torch.zeros_like(gradient) if scale == 0 else gradient * scale

    def _deliver_whole(self, gradient: Tensor) -> None:
        if not self._has_warned:
            self._has_warned = True
            _warn_whole_gradient(self.name)
        gradient = gradient.to_dense()
        ids = gradient.reshape(len(gradient), -1).any(1).nonzero().squeeze(1)
        slots, order = torch.sort(self.row_map.slots(ids))
        self._is_surprised = True  # Nobody has noted that these rows may change.
        self.deliver(slots, gradient[ids[order]], None, self._num_updates)

    def _no_rows(self) -> Tensor:
        return torch.empty(
            (0, *self.parameter.shape[1:]),
            dtype=self.parameter.dtype,
            device=self.parameter.device,
        )

    def _fetched(self, request: Request) -> Tensor:
        """The rows of a lookup that trains."""
        operation = self._peers.operation(Verb.LOOKUP, self.name)
        if self.shard is None:
            return self._own_rows(operation, request)
        missing = self._cache.missing(request.slots)
        if self._foreseen:
            return self._foreseen_rows(request, missing)
        self.surprise()
        rows = self._pulled(operation, request, missing)
        return self._cache.completed(request.slots, missing, rows, limit=self.row_map.largest)

    def _fetched_without_gradient(self, request: Request) -> Tensor:
        """Of an evaluation, which says nothing of what steps touch, or of a frozen table."""
        operation = self._peers.operation(Verb.LOOKUP_WITHOUT_GRADIENT, self.name)
        is_step = torch.is_grad_enabled()
        with nullcontext() if is_step else self._peers.ledger.aside():
            if self.shard is None:
                return self._own_rows(operation, request)
            return self._pulled(operation, request, request.slots)

    def _own_rows(self, operation: Operation, request: Request) -> Tensor:
        self._raise_faults(self._peers.announce(operation, fault=request.fault).faults)
        return self.values("lookup").index_select(0, self.row_map.ids(request.slots))

    def _pulled(self, operation: Operation, request: Request, missing: Tensor) -> Tensor:
        peers = self._peers
        assert self.shard is not None
        errand = self._hooks.neighbours.ask(operation, [self.row_map], [missing])
        asked, fault = errand.slots[0], request.fault
        rows, faults = pull(peers, operation, self.row_map, self.shard, asked, fault)
        self._raise_faults(faults)
        with peers.waiting(operation):
            (rows,) = errand.delivered([rows])
        peers.ledger.add(self.name, rows=len(missing))
        return rows

    def _guessed(self, ids: Tensor) -> tuple[Request, Tensor] | None:
        """What a lookup asks for and gets, if it is the very one that was foreseen."""
        if not self._foreseen or self._guess is None:
            return None
        guess, rows = self._guess
        request = guess.answer(ids)
        if request is None:
            return None
        self._peers.operation(Verb.LOOKUP, self.name)
        self._is_used = True
        return request, rows

    def _foreseen_rows(self, request: Request, missing: Tensor) -> Tensor:
        """Nobody else takes part: the others have their rows. See [Note: detour]."""
        peers, rows = self._peers, self._no_rows()
        self._is_used = True
        if request.is_faulty:
            self._raise_alone(request.fault)
        if len(missing):
            self._is_surprised = True
            operation = peers.operation(Verb.DETOUR, self.name)
            places = self.row_map.places(missing)
            rows = peers.detour(operation, self.row_map.counts(missing), places)
        # Without a limit: a later lookup of the batch has to find its rows as well.
        return self._cache.completed(request.slots, missing, rows, limit=self.row_map.num_rows)

    def _raise_alone(self, fault: tuple[Fault, int]) -> None:
        """Raise what is wrong with this worker's ids, and have the others raise it too."""
        faults = [(Fault.NONE, 0)] * self._peers.num_workers
        faults[self._peers.rank] = fault
        try:
            self._raise_faults(faults)
        except (IndexError, TypeError) as error:
            self._peers.report(error)
            raise

    def _raise_faults(self, faults: list[tuple[Fault, int]]) -> None:
        """All workers raise what one of them found wrong with its ids."""
        for rank, (fault, value) in enumerate(faults):
            whose = f" on worker {rank}" if len(faults) > 1 else ""
            if fault is Fault.BAD_ID:
                raise IndexError(
                    f"id {value}{whose} is out of range for table {self.name!r}, "
                    f"which has {self.row_map.num_rows} rows"
                )
            if fault is Fault.BAD_TYPE:
                raise TypeError(
                    f"the ids{whose} for table {self.name!r} must be a tensor of int64 or int32"
                )

    def _place_of(self, row: int | None, slots: Tensor) -> int | None:
        if row is None:
            return None
        found = (slots == self.row_map.slot(row)).nonzero()
        return int(found) if len(found) else None


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


def _without(rows: Tensor, place: int) -> Tensor:
    return torch.cat([rows[:place], rows[place + 1 :]])


class _Delivery(torch.autograd.Function):
    """Hands the gradient of pulled rows to their table. The anchor ties it into the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        rows: Tensor,
        table: TableRows,
        slots: Tensor,
        padding_place: int | None,
        num_updates: int,
    ) -> Tensor:
        ctx.table, ctx.slots, ctx.padding_place = table, slots, padding_place
        ctx.num_updates = num_updates
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.table.deliver(ctx.slots, gradient, ctx.padding_place, ctx.num_updates)
        return None, None, None, None, None, None
