"""parallelize(): the one place that joins the rest."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parallax import checkpoint
from parallax.analysis import analyse, refuse_early_steps, refuse_unsupported
from parallax.cluster import find_place, resume_dir, use_interface
from parallax.comm.agreement import Agreement
from parallax.comm.board import Board
from parallax.comm.detour import Detours
from parallax.comm.groups import Groups
from parallax.comm.header import Layout
from parallax.comm.host_merge import MAX_KEYS, HostMerge
from parallax.comm.peers import Peers
from parallax.config import Config
from parallax.course import Course
from parallax.data import ShardedLoader
from parallax.engine import placement
from parallax.engine.backward import REDUCTION
from parallax.engine.clip import clip_norm
from parallax.engine.engine import Engine
from parallax.engine.guard import guard_copies
from parallax.engine.ownership import check_arguments, owners_of
from parallax.engine.prefetcher import AHEAD
from parallax.engine.row_optimizer import check_rule, refuse_closures, updater_of
from parallax.errors import ConfigError
from parallax.hosts import Hosts
from parallax.ledger import Ledger
from parallax.plan import Plan, Route
from parallax.planner import RowRule, Updater, make_plan
from parallax.progress import Progress
from parallax.tables.table import Table
from parallax.wire import Wire

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
        self._handles: list[Any] = []
        with ExitStack() as made:  # An error undoes what there is so far: another may begin.
            self._set_up(plan, made)
            made.pop_all()
        self._log_plan()
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

    def shard(
        self,
        loader: DataLoader[Any],
        *,
        split: bool = False,
        ids: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> ShardedLoader:
        """This worker's share of every global batch of a DataLoader.

        By default the loader's batch size is each worker's, as with DDP. With `split=True` it is
        the global batch's, which the workers share. No sample is lost or doubled; a worker with
        none left gets an empty batch, which counts for nothing.

        `ids` names ids that `forward` computes from a batch (hashed n-grams, sampled negatives), so
        that their rows are prefetched too: table → a function of the batch that returns them, or
        a list with the ids of each lookup. It must be deterministic; for sampled negatives let
        `forward` use what the function returned. A lookup with other ids is still exact.
        """
        sharded = ShardedLoader(
            loader,
            Agreement(self._peers),
            split=split,
            on_batch=self._engine.weight.set_counts,
            on_end=self._engine.weight.forget_counts,
            feed=self._progress.feed_of(loader),
            follower=self._engine,
            ids=ids,
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
        self._engine.weight.set_by_hand(count)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backwards inside stay on this worker, and go with the next one outside."""
        with self._engine.backward.no_sync():
            yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of all gradients, dense and sharded; returns the norm before. Collective.

        Only scalars travel.
        """
        self._engine.backward.catch_up(max(self._seen.values()))
        plain = [p for p in self.model.parameters() if not isinstance(p, Table)]
        return clip_norm(
            [p.grad for p in plain if p.grad is not None],
            self._engine.tables.groups,
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
                table = self._engine.tables.by_id[id(value)]
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
        self._unhook()
        self._engine.close()
        self._peers.close()
        self._groups.close()
        self._progress.close()
        self._course.close()

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
        if self._groups.store is not None:
            placement.compare(self._description(plan), self._peers, self._groups.store)
        merge, device = self._host_merge(plan), self._device()
        self._course = Course(plan, self.config, self._peers, merge, self.hosts, device)
        made.callback(self._course.close)
        self._progress = Progress(
            self.config, self._resume_dir, self._peers, self.optimizers, self._contents
        )
        made.callback(self._progress.close)
        self._engine = Engine(
            self.model,
            self._facts,
            self._owners,
            self.optimizers,
            self.config,
            self._peers,
            merge,
            self._course,
            self._progress,
            (self._groups.dense, self._groups.sums),
            device,
        )
        made.callback(self._engine.close)
        self._rules = {name: updater.rule for name, updater in self._updaters().items()}
        tables = self._engine.tables.by_name
        self._course.start(
            tables, {n: t for n, t in tables.items() if self._may_move(n)}, self._engine.move
        )
        made.callback(self._unhook)
        self._hook()

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
        """Return the other workers, and what can be told to them."""
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

    def _host_merge(self, plan: Plan) -> HostMerge:
        ranks = self.hosts.workers[self.hosts.index]
        inside = self._peers.inside(ranks, *self._groups.host)
        tables = [p for p in plan.parameters if p.route in (Route.SHARDED, Route.OBSERVED)]
        num_keys = sum(p.shape[0] for p in tables)
        is_on = self.config.merge_hosts and self.hosts.are_shared and num_keys > 0
        if is_on and num_keys >= MAX_KEYS:
            _log.warning("tables of %d rows are too large for hosts to merge rows", num_keys)
            is_on = False
        return HostMerge(self._peers, inside, self.hosts, is_on=is_on)

    def _hook(self) -> None:
        """Let the model and the optimizers call this session."""
        handles = self._handles
        if self.num_workers > 1:
            handles += guard_copies(self.model, set(self._engine.tables.by_id), self._peers)
        for each in self.optimizers:
            swap_back = self._engine.row_optimizers[id(each)].swap_back
            handles.append(each.register_step_pre_hook(self._before_step))
            handles.append(each.register_step_post_hook(self._after_step))
            handles.append(each.register_state_dict_pre_hook(swap_back))
            handles.append(each.register_load_state_dict_pre_hook(swap_back))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _may_move(self, name: str) -> bool:
        """Whether a table's route is the plan's to change: only where both give one result."""
        is_exact = self._rules[name] is RowRule.EXACT
        takes_dense = self._updaters()[name].takes_dense
        free = self.config.route_of(name) is None
        return self.config.replan and is_exact and takes_dense and free

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
        self.model.zero_grad()
        self._engine.drop_gradients()
        self._peers.step = restored.step
        self._steps = dict.fromkeys(self._steps, restored.step)
        self._progress.restore(restored, resumed=resumed)

    # While training -----------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called by torch before each `optimizer.step()`."""
        self._engine.row_optimizers[id(optimizer)].swap_back()  # An exception may have ended one.
        self._check_groups(optimizer)
        args, kwargs = _closure_run(args, kwargs)
        self._engine.backward.catch_up(self._seen[id(optimizer)])
        self._seen[id(optimizer)] = self._engine.backward.num_reductions
        self._engine.begin_update(optimizer)
        return args, kwargs

    def _check_groups(self, optimizer: Optimizer) -> None:
        """Groups and hyper-parameters are live: what they are now must still be exact."""
        for group in optimizer.param_groups:
            parameters = group["params"]
            if not self._owners.keys() >= set(map(id, parameters)):
                _refuse_new(optimizer, parameters, self._owners)
            updater = updater_of(optimizer, group)
            if updater.rule is RowRule.EXACT:
                continue
            for parameter in parameters:
                table = self._engine.tables.by_id.get(id(parameter))
                if table is not None and table.name not in self._engine.densified:
                    check_rule(table.name, self._rules[table.name], updater)

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Called by torch after each `optimizer.step()`."""
        engine = self._engine
        engine.end_update(optimizer)
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] > self._peers.step:
            self._end_step()
        self._have_stepped.add(id(optimizer))
        if len(self._have_stepped) == len(self.optimizers):  # Some may step more often.
            self._have_stepped.clear()
            engine.settle()
            self._course.look(engine.backward.num_reductions)
        is_settled = self._steps[id(optimizer)] == min(self._steps.values())
        called, engine.save_called = engine.save_called, False
        self._progress.after_step(called=called, is_settled=is_settled)

    def _end_step(self) -> None:
        engine = self._engine
        engine.end_step()
        if engine.buffers_changed and self.config.broadcast_buffers:
            engine.buffers.broadcast(self._peers, f"giving out buffers in step {self.step}")
            engine.buffers_changed = False
        self._peers.next_step()
        self._progress.end_step()
        self.ledger.close_step()
        self._course.end_step()

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

    def _updaters(self) -> dict[str, Updater]:
        absent = Updater("no optimizer", RowRule.ABSENT)
        return {
            fact.name: updater_of(*self._owners[id(fact.parameter)])
            if id(fact.parameter) in self._owners
            else absent
            for fact in self._facts
        }

    def _contents(self) -> checkpoint.Contents:
        self._engine.give_up_updates()  # An exception in the last step may have left rows there.
        return checkpoint.Contents(
            model=self.model,
            optimizers=self.optimizers,
            tables={id(t.parameter): t for t in self._engine.tables.sharded},
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


def _refuse_new(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], owners: Mapping[int, object]
) -> None:
    new = next(parameter for parameter in parameters if id(parameter) not in owners)
    raise ConfigError(
        f"{type(optimizer).__name__} got a parameter of shape {tuple(new.shape)} after "
        "parallelize(), which is not kept the same on all workers: give it all parameters before"
    )


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


def _detached(value: object) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
