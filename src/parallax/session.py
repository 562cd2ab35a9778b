"""parallelize(): the one place that joins the rest."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parallax import checkpoint, placement
from parallax.analysis import analyse, refuse_early_steps, refuse_unsupported
from parallax.backward import REDUCTION, Backward, Weight
from parallax.clip import clip_norm
from parallax.cluster import find_place, resume_dir, use_interface
from parallax.config import Config
from parallax.course import Course
from parallax.data import ShardedLoader
from parallax.dense import DenseRoute
from parallax.errors import ConfigError
from parallax.exchange.agreement import Agreement
from parallax.exchange.board import Board
from parallax.exchange.detour import Detours
from parallax.exchange.groups import Groups
from parallax.exchange.header import Layout
from parallax.exchange.neighbours import Neighbours
from parallax.exchange.peers import Peers
from parallax.foresight import AHEAD, Foresight
from parallax.guard import guard_copies
from parallax.hosts import Hosts
from parallax.ledger import Ledger
from parallax.optim import (
    RowStep,
    check_rule,
    gather_state,
    refuse_closures,
    refuse_dense,
    shard_state,
    updater_of,
)
from parallax.ownership import check_arguments, owners_of
from parallax.plan import Plan, Route
from parallax.planner import RowRule, Updater, make_plan
from parallax.progress import Progress
from parallax.sparse import Hooks, TableRows, warn_whole
from parallax.table import Table, make_plain, set_data
from parallax.wire import Wire, rounded

_log = logging.getLogger("parallax")
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    config: Config | str | Path | None = None,
    **overrides: Any,
) -> Session:
    """Make `model` and `optimizer` train data-parallel, in place.

    Call it in the same way on every worker, after the model is built and moved to its device.
    Rank 0's parameters and buffers win. With one process it leaves training as it is. `config` is
    a `Config` or a TOML file; fields of `Config` can also be given as keywords.
    """
    chosen = config if isinstance(config, Config) else Config.load(config) if config else Config()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return Session(model, optimizers, chosen.replace(**overrides))


class Session:
    """A model in data-parallel training, from `parallelize()` to `close()`."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], config: Config) -> None:
        check_arguments(model, optimizers)
        _check_free(model)
        self.model = model
        self._modules = list(model.modules())
        self._children: list[nn.Module | None] = []
        self.optimizers = optimizers
        self.config = config
        self.ledger = Ledger(config.ledger_steps)
        self._place = find_place()
        self._resume_dir = _free_resume_dir()
        self._owners = owners_of(model, optimizers)
        self._facts = analyse(model)
        for each in optimizers:
            refuse_closures(each, self.num_workers)
        if self.num_workers > 1:
            refuse_unsupported(model)
            refuse_early_steps(model)
        plan = make_plan(self._facts, self._updaters(), config, self.num_workers)
        self._seen = {id(each): 0 for each in optimizers}
        self._steps = {id(each): 0 for each in optimizers}
        self._have_stepped: set[int] = set()
        with ExitStack() as made:  # An error undoes what there is so far: another may begin.
            self._set_up(plan, made)
            made.pop_all()
        self._log_plan()
        self._progress.follow(self._backward)
        _sessions.add(self)
        self._resume()
        self.ledger.begin()

    # What a script reads ------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._place.rank

    @property
    def num_workers(self) -> int:
        return self._place.num_workers

    @property
    def local_rank(self) -> int:
        """This worker's number on its host, from 0."""
        return self.hosts.local_rank

    @property
    def hosts(self) -> Hosts:
        """Which workers share a host: `session.hosts.workers[session.hosts.index]` this one's."""
        return self._groups.hosts

    @property
    def device(self) -> torch.device:
        """Where this worker's model is, and its batches belong."""
        return self._device()

    @property
    def step(self) -> int:
        """How many steps the optimizer has taken."""
        return self._peers.step

    @property
    def plan(self) -> Plan:
        """The route of each parameter, and why; what newer steps took, beside what they should."""
        return self._course.observed

    # What a script does -------------------------------------------------------------------

    def shard(self, loader: DataLoader[Any], *, split: bool = False) -> ShardedLoader:
        """This worker's share of every global batch of a DataLoader.

        By default the loader's batch size is each worker's, as with DDP. With `split=True` it is
        the global batch's, which the workers share. No sample is lost or doubled; a worker with
        none left gets an empty batch, which counts for nothing.
        """
        sharded = ShardedLoader(
            loader,
            Agreement(self._peers),
            split=split,
            on_batch=self._weight.set_counts,
            on_end=self._weight.forget_counts,
            feed=self._progress.feed_of(loader),
            foresight=self._foresight,
        )
        self._progress.loaders.add(sharded)
        return sharded

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs that are left of `total`, from 0 or from the restored one.

            for epoch in session.epochs(10):
                for batch in loader: ...

        After a restore the loop begins with the epoch that was interrupted, and sharded loaders
        continue in the middle of it. The number is kept in checkpoints; an epoch whose batches
        the script has left, by their end or a `break`, counts as done.
        """
        return self._progress.epochs.up_to(total)

    def attach(self, name: str, thing: Any) -> None:
        """Keep a scheduler, a GradScaler or a counter of the script's own in checkpoints.

        Anything with `state_dict()` of plain values and `load_state_dict()`. Rank 0's state is
        kept, and every worker restores it: at once, if a checkpoint was loaded before. A name that
        the checkpoint does not have, or that is never attached, is a warning.
        """
        if thing is self.model or any(thing is each for each in self.optimizers):
            raise ConfigError(f"{name!r} is in every checkpoint already: do not attach() it")
        self._progress.attach(name, thing)

    def weight(self, count: float) -> None:
        """Give this worker's number of samples or tokens for the next backwards by hand.

        Its mean loss then counts count/Σcounts. Call it on every worker, before backward; it
        holds until `optimizer.step()` or the next batch of `shard()`.
        """
        self._weight.set_by_hand(count)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backwards inside stay on this worker, and go with the next one outside."""
        with self._backward.no_sync():
            yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of all gradients, dense and sharded; returns the norm before. Collective.

        Only scalars travel.
        """
        self._backward.catch_up(max(self._seen.values()))
        plain = [p for p in self.model.parameters() if not isinstance(p, Table)]
        return clip_norm(
            [p.grad for p in plain if p.grad is not None],
            list(self._tables.values()),
            self._peers,
            max_norm,
            float(norm_type),
            error_if_nonfinite,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The full, plain state dict on rank 0 under the original names; {} elsewhere. Collective.

        `Model().load_state_dict(state)` takes it: so rank 0 can evaluate alone, in a model of its
        own, while the others go on.
        """
        found: dict[str, Tensor] = {}
        collected: dict[int, Tensor | None] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, Table) and id(value) not in collected:
                table = self._tables_by_id[id(value)]
                part = table.values("state_dict") if table.local else table.shard
                assert part is not None
                collected[id(value)] = part.clone() if table.local else table.collected(part)
            whole = collected[id(value)] if isinstance(value, Table) else _detached(value)
            if self.rank == 0 and whole is not None:
                found[name] = whole
        return found

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that loads at any number of workers. Collective, atomic."""
        checkpoint.save(Path(path), self._contents(), self._peers)

    def load(self, path: str | Path) -> None:
        """Restore parameters, optimizers, random numbers and the place in the data. Collective.

        A checkpoint that does not fit, or is damaged, raises and changes nothing. Gradients that
        wait for a step are dropped: they are not those of the restored parameters.
        """
        self._take_over(checkpoint.load(Path(path), self._contents(), self._peers))

    def close(self) -> None:
        """Give the optimizer back and end the session; another may begin. Local, not collective."""
        if self not in _sessions:
            return
        _sessions.discard(self)
        self._leave()
        self._foresight.close()
        self._peers.close()
        self._groups.close()
        self._progress.close()
        self._course.close()

    def _leave(self) -> None:
        """Give model and optimizers back; tables of which other workers have rows stay tables."""
        for handle in self._handles:
            handle.remove()
        for step in self._row_steps.values():
            step.swap_back()
        self._backward.dense.close()
        for table in self._tables.values():
            table.release()
            if table.local and not table.used_whole:
                values = table.values("close")
                make_plain(table.parameter)
                set_data(table.parameter, values)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session(rank={self.rank}, num_workers={self.num_workers}, step={self.step})"

    # Joining ------------------------------------------------------------------------------

    def _set_up(self, plan: Plan, made: ExitStack) -> None:
        """Join the others and put every parameter on its route; `made` undoes it."""
        self._groups = self._gather()
        made.callback(self._groups.close)
        self._peers = self._introduced(plan)
        made.callback(self._peers.close)
        self._compare(plan)
        self._neighbours = self._find_neighbours(plan)
        self._course = Course(
            plan, self.config, self._peers, self._neighbours, self.hosts, self._device()
        )
        made.callback(self._course.close)
        self._progress = Progress(
            self.config, self._resume_dir, self._peers, self.optimizers, self._contents
        )
        made.callback(self._progress.close)
        self._join(made)

    def _gather(self) -> Groups:
        """Join the other workers."""
        if self.num_workers > 1:
            use_interface(self.config.interface)
        groups = Groups(self._place, self._given_device(), self.config.timeout_seconds)
        given, found = self._place.local_rank, groups.hosts.local_rank
        if given is None:
            self._place = replace(self._place, local_rank=found)
        elif given != found:
            _log.info("worker %d: LOCAL_RANK is %d, on its host it is %d", self.rank, given, found)
        return groups

    def _introduced(self, plan: Plan) -> Peers:
        """The other workers, and what can be told to them."""
        store = self._groups.store
        board = detours = None
        if store is not None:
            detours = Detours(store, self.rank, self.config.timeout_seconds)
            board = Board(store, self.rank, self.num_workers, detours.answer)
        peers = Peers(
            self.rank,
            self.num_workers,
            ledger=self.ledger,
            timeout_seconds=self.config.timeout_seconds,
            control=self._groups.control,
            rows=self._groups.rows,
            ahead=self._groups.ahead,
            control_ahead=self._groups.control_ahead,
            board=board,
            detours=detours,
            wire=Wire(self.config.wire),
        )
        tables = [p for p in plan.parameters if p.route in (Route.SHARDED, Route.OBSERVED)]
        names = [fact.name for fact in self._facts]
        peers.layout = Layout(
            max_counts=max(1, len(tables)), num_flags=2 * len(names) + len(tables) + 2
        )
        peers.name_subjects([*names, REDUCTION, AHEAD, checkpoint.SAVING, checkpoint.LOADING])
        return peers

    def _compare(self, plan: Plan) -> None:
        """See that the other workers have the same model."""
        if self._groups.store is not None:
            placement.compare(self._description(plan), self._peers, self._groups.store)

    def _find_neighbours(self, plan: Plan) -> Neighbours:
        ranks = self.hosts.workers[self.hosts.index]
        inside = self._peers.inside(ranks, *self._groups.host)
        is_on = self.config.merge_hosts and self.hosts.are_shared
        tables = [p for p in plan.parameters if p.route in (Route.SHARDED, Route.OBSERVED)]
        is_on = is_on and any(p.shape[0] for p in tables)
        return Neighbours(self._peers, inside, self.hosts, is_on=is_on)

    def _join(self, made: ExitStack) -> None:
        """Put every parameter on its route."""
        self._tables: dict[str, TableRows] = {}
        self._row_steps: dict[int, RowStep] = {}
        self._handles: list[Any] = []
        names, plan = [fact.name for fact in self._facts], self._course.plan
        self._weight = Weight(self._peers)
        self._backward = Backward(self._peers, self._weight, names, self._buffers, self._device())
        dense = DenseRoute(
            self._peers,
            self._groups.dense,
            self._groups.sums,
            self.config.bucket_megabytes,
            self._backward.begin,
            self._weight.scale,
            names,
        )
        self._backward.dense = dense
        self._backward.neighbours = self._neighbours
        self._backward.num_partitions = lambda: self._course.num_partitions
        self._backward.observed = self._observed
        made.callback(self._leave)
        placement.make_real(self.model, self._facts, plan, self._device(), self.optimizers)
        placement.spread(self._facts, plan, self._buffers(), self._peers)
        self._backward.buffers_settled(self._buffers())
        self._place_parameters(dense, made)
        self._backward.tables = self._tables
        self._row_steps = {id(each): RowStep(each) for each in self.optimizers}
        sharded = {id(table.parameter) for table in self._tables.values()}
        if self.num_workers > 1:
            self._handles += guard_copies(self.model, sharded, self._peers)
        for each in self.optimizers:
            self._handles.append(each.register_step_pre_hook(self._before_step))
            self._handles.append(each.register_step_post_hook(self._after_step))
            swap_back = self._row_steps[id(each)].swap_back
            self._handles.append(each.register_state_dict_pre_hook(swap_back))
            self._handles.append(each.register_load_state_dict_pre_hook(swap_back))

    def _place_parameters(self, dense: DenseRoute, made: ExitStack) -> None:
        foresight = self._foresight = Foresight(
            self._peers,
            self._neighbours,
            self._tables,
            is_on=self.config.lookahead,
            # NCCL's groups must be used in one order, which two threads do not have.
            is_early=self._device().type == "cpu",
        )
        made.callback(foresight.close)
        hooks = Hooks(self._backward.begin, self._left, self._neighbours, foresight.looked_up)
        self._backward.blind, self._backward.settle = foresight.blind, foresight.settle
        if self._peers.detours is not None:
            self._peers.detours.serve = self._served
        for fact in self._facts:
            route = self._course.plan[fact.name].route
            if route in (Route.SHARDED, Route.OBSERVED):
                table = TableRows(fact.name, fact.parameter, self._peers, hooks)
                self._tables[fact.name] = table
            elif route is not Route.LOCAL:
                dense.adopt(fact.name, fact.parameter)
        self._place_tables(made)
        self._tables_by_id = {id(t.parameter): t for t in self._tables.values()}
        self._rules = {name: updater.rule for name, updater in self._updaters().items()}
        self._movable = {n: t for n, t in self._tables.items() if self._may_move(n)}
        self._course.start(self._tables, self._movable, self._move)

    def _place_tables(self, made: ExitStack) -> None:
        """Those on the meta device first: their start values may be wrong, and they can go back."""
        sharded = [f for f in self._facts if self._course.plan[f.name].route is Route.SHARDED]
        for fact in sorted(sharded, key=lambda fact: not fact.parameter.is_meta):
            table = self._tables[fact.name]
            if fact.parameter.is_meta:
                made.callback(_make_meta, table)
            placement.place_table(table, fact, self.config, self._device(), self._peers)
        for fact in sharded:
            self._shard_state(self._tables[fact.name])

    def _may_move(self, name: str) -> bool:
        """Whether a table's route is the plan's to change: only where both give one result."""
        is_exact = self._rules[name] is RowRule.EXACT
        takes_dense = self._updaters()[name].takes_dense
        free = self.config.route_of(name) is None
        return self.config.replan and is_exact and takes_dense and free

    def _served(self, name: str, places: Tensor) -> Tensor:
        """Rows of a table that this worker owns."""
        shard = self._tables[name].shard
        assert shard is not None
        return rounded(shard.index_select(0, places.to(shard.device)), self._peers.wire)

    def _shard_state(self, table: TableRows) -> None:
        owner = self._owners.get(id(table.parameter))
        if owner is not None:
            shard_state(owner[0], table)

    def _log_plan(self) -> None:
        if self.rank == 0:
            _log.info("%s", self._course.plan)
            for hint in self._course.plan.hints():
                _log.warning("%s", hint)

    def _resume(self) -> None:
        try:
            restored = self._progress.find()
            if restored is not None:
                self._take_over(restored, resumed=True)
        except BaseException:
            self.close()
            raise

    def _take_over(self, restored: checkpoint.Restored, *, resumed: bool = False) -> None:
        """Parameters and optimizers are restored; so is the rest now."""
        self._drop_gradients()
        self._peers.step = restored.step
        self._steps = dict.fromkeys(self._steps, restored.step)
        self._progress.restore(restored, resumed=resumed)

    # While training -----------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called by torch before each `optimizer.step()`."""
        self._row_steps[id(optimizer)].swap_back()  # An exception may have left stand-ins there.
        self._check_groups(optimizer)
        args, kwargs = _closure_run(args, kwargs)
        self._backward.catch_up(self._seen[id(optimizer)])
        self._seen[id(optimizer)] = self._backward.count
        self._row_steps[id(optimizer)].swap_in(self._tables_by_id)
        return args, kwargs

    def _check_groups(self, optimizer: Optimizer) -> None:
        """Groups and hyper-parameters are live: what they are now must still be exact."""
        for group in optimizer.param_groups:
            updater = updater_of(optimizer, group)
            for parameter in group["params"]:
                if id(parameter) not in self._owners:
                    raise ConfigError(
                        f"{type(optimizer).__name__} got a parameter of shape "
                        f"{tuple(parameter.shape)} after parallelize(), which is not kept the same "
                        "on all workers: give it all parameters before"
                    )
                table = self._tables_by_id.get(id(parameter))
                if table is not None and not table.used_whole:
                    check_rule(table.name, self._rules[table.name], updater)

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Called by torch after each `optimizer.step()`."""
        self._row_steps[id(optimizer)].swap_out()
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] > self._peers.step:
            self._end_step()
        self._have_stepped.add(id(optimizer))
        if len(self._have_stepped) == len(self.optimizers):  # Some may step more often.
            self._have_stepped.clear()
            self._weight.end_step()
            self._course.look(self._backward.count)
        is_settled = self._steps[id(optimizer)] == min(self._steps.values())
        self._progress.after_step(self._backward, is_settled=is_settled)

    def _end_step(self) -> None:
        self._backward.dense.settle()
        for table in self._tables.values():
            table.retired = table.used_whole
        if self._backward.buffers_changed and self.config.broadcast_buffers:
            buffers = self._buffers()
            self._peers.spread_all(buffers, f"giving out buffers in step {self.step}")
            self._backward.buffers_settled(buffers)
        self._peers.next_step()
        self._progress.end_step()
        self.ledger.close_step()
        self._course.end_step()

    def _observed(self, used: set[str], whole: set[str]) -> None:
        """All workers know which observed parameters were used whole by any of them."""
        for table in self._tables.values():
            if table.shard is not None or table.used_whole or table.name not in used:
                continue
            if table.name in whole:
                table.become_whole("another worker")
            else:
                table.place(table.own_part(table.values("sharding")))
                self._shard_state(table)
                self._course.reroute(table.name, Route.SHARDED, "only rows of it were looked up")

    def _left(self, table: TableRows, why: str, planned: bool) -> None:
        """A table is an ordinary parameter from now on."""
        owner = self._owners.get(id(table.parameter))
        if not planned:
            self._movable.pop(table.name, None)
            if table.shard is not None:
                warn_whole(table.name, why)
            why = f"used whole by {why}"
        if owner is not None:
            refuse_dense(table.name, owner[0], why)
            if table.shard is not None:
                gather_state(owner[0], table)
        route = Route.ALL_REDUCE if self.num_workers > 1 else Route.LOCAL
        self._course.reroute(table.name, route, why)
        self._backward.dense.adopt(table.name, table.parameter, stray=True)

    def _move(self, table: TableRows, route: Route, why: str) -> None:
        """Bring a table to another route."""
        if route is Route.ALL_REDUCE:
            table.become_whole(why, planned=True)
            return
        self._backward.dense.release(table.name)
        table.become_rows()
        self._shard_state(table)
        self._course.reroute(table.name, route, why)

    def _drop_gradients(self) -> None:
        self.model.zero_grad()
        for table in self._tables.values():
            table.zero()  # also what no backward has reduced yet

    # Inside -------------------------------------------------------------------------------

    def _description(self, plan: Plan) -> list[str]:
        """What must be the same on every worker, a line for each thing."""
        lines = []
        for fact in self._facts:
            line = plan[fact.name]
            group = self._owners.get(id(fact.parameter), (None, {}))[1]
            options = ", ".join(f"{k}={v!r}" for k, v in group.items() if k != "params")
            lines.append(
                f"parameter {fact.name!r} {line.shape} {fact.parameter.dtype}, {line.route.value}, "
                f"{'free' if self.config.route_of(fact.name) is None else 'forced'}, "
                f"{self._updaters()[fact.name].name} with {options}"
            )
        saves = self.config.checkpoint_dir is not None or self._resume_dir is not None
        schedule = checkpoint.Schedule.of(self.config)
        lines.append(f"checkpoints {schedule}" if saves else "no checkpoints by themselves")
        lines.append("tables may move" if self.config.replan else "tables stay")
        lines.append(f"rows travel as {self.config.wire}")
        lines.append(f"{self.config.min_partitions} partitions at least")
        lines.append("hosts merge rows" if self.config.merge_hosts else "hosts do not merge rows")
        lines.append("a run's folder" if self.config.run_dir is not None else "no run's folder")
        for name, buffer in self.model.named_buffers():
            lines.append(f"buffer {name!r} {tuple(buffer.shape)} {buffer.dtype}")
        return lines

    def _device(self) -> torch.device:
        given = self._given_device()
        if given is not None:
            return given
        # A GPU only if every worker has one: all must exchange in the same way.
        return self._place.device if self._groups.device_type == "cuda" else torch.device("cpu")

    def _given_device(self) -> torch.device | None:
        """What the script chose, if it did."""
        if self.config.device is not None:
            return torch.device(self.config.device)
        return next((p.device for p in self.model.parameters() if not p.is_meta), None)

    def _buffers(self) -> list[Tensor]:
        """As they are now: a module may have put another tensor in a buffer's place. To go through
        hundreds of modules takes long, so that is done only if one has other children than before.
        """
        children = [child for module in self._modules for child in module._modules.values()]
        if children != self._children:
            self._modules, self._children = list(self.model.modules()), children
        found = (buffer for module in self._modules for buffer in module._buffers.values())
        return list({id(buffer): buffer for buffer in found if buffer is not None}.values())

    def _updaters(self) -> dict[str, Updater]:
        absent = Updater("no optimizer", RowRule.ABSENT)
        return {
            fact.name: updater_of(*self._owners[id(fact.parameter)])
            if id(fact.parameter) in self._owners
            else absent
            for fact in self._facts
        }

    def _contents(self) -> checkpoint.Contents:
        for step in self._row_steps.values():
            step.swap_back()  # an exception in the last step may have left rows in a table's place
        return checkpoint.Contents(
            model=self.model,
            optimizers=self.optimizers,
            tables={id(t.parameter): t for t in self._tables.values() if t.shard is not None},
            loaders=self._progress.loaders.present,
            step=self.step,
            epoch=self._progress.loaders.epoch,
            attached=self._progress.attached,
        )


def _check_free(model: nn.Module) -> None:
    if any(session.model is model for session in _sessions):
        raise ConfigError(
            "this model is parallelized already; use the session it has, or session.close() first"
        )


def _free_resume_dir() -> str | None:
    """The folder of `--resume` has the checkpoints of one model: the first that is parallelized."""
    asked = resume_dir()
    if asked is not None and any(session._resume_dir == asked for session in _sessions):
        _log.warning(
            "--resume %r belongs to the session that is open already; this one begins from nothing",
            asked,
        )
        return None
    return asked


def _closure_run(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run a closure before the gradients are pushed, where torch would inside `step()`."""
    offset = 1 if args and isinstance(args[0], Optimizer) else 0
    closure = kwargs.get("closure", args[offset] if len(args) > offset else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:offset], {**kwargs, "closure": lambda: loss}


def _make_meta(table: TableRows) -> None:
    """Turn a table back that was on the meta device before it was placed."""
    table.release()
    table.shard = None
    make_plain(table.parameter)
    set_data(table.parameter, torch.empty_like(table.parameter, device="meta"))


def _detached(value: object) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
