"""What lasts from step to step: tables, routes, and the current step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from parallax.comm.host_merge import HostMerge
from parallax.comm.peers import Peers
from parallax.comm.request import LastRequest
from parallax.config import Config
from parallax.engine import placement
from parallax.engine.backward import Backward
from parallax.engine.buffers import Buffers
from parallax.engine.dense import DenseRoute
from parallax.engine.pending import PendingGradients
from parallax.engine.prefetcher import Pass, Prefetcher
from parallax.engine.row_optimizer import RowOptimizer, refuse_dense
from parallax.engine.sparse_table import Home, SparseTable, warn_whole
from parallax.engine.step import Step
from parallax.engine.table_set import TableSet
from parallax.engine.trained_model import TrainedModel
from parallax.engine.weight import Weight
from parallax.planning.adaptive_plan import AdaptivePlan
from parallax.planning.changes import MoveTable
from parallax.planning.plan import Plan, Route, RowRule
from parallax.tables.merge import any_in_row
from parallax.tables.table import make_plain, set_data

_log = logging.getLogger("parallax")


class SavePoints(Protocol):
    """Who saves checkpoints by schedule."""

    def wants_save(self) -> bool:
        """Return whether this worker asks all to save after this step."""

    def call_save(self) -> None:
        """Called on all workers if one of them has asked for a save after this step."""

    def before_reduction(self) -> None:
        """Called before a reduction. Collective if a checkpoint is saved here."""


class Engine:
    """Trains the parameters of one session, each on its route."""

    def __init__(
        self,
        trained: TrainedModel,
        tables: TableSet,
        row_optimizers: Mapping[int, RowOptimizer],
        config: Config,
        peers: Peers,
        host_merge: HostMerge,
        adaptive_plan: AdaptivePlan,
        save_points: SavePoints,
        dense_groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
        device: torch.device,
    ) -> None:
        """Place every parameter on its route. Collective.

        `row_optimizers` are by id of the optimizer, `dense_groups` for gradients and for sums.
        """
        self.names = [fact.name for fact in trained.facts]
        self.peers = peers
        self.host_merge = host_merge
        self.save_points = save_points
        self.weight = Weight(peers)
        self.buffers = Buffers(trained.model, broadcasts=config.broadcast_buffers)
        self.requests = LastRequest()
        self.densified: set[str] = set()
        """Tables that have become dense parameters."""
        self._adaptive_plan = adaptive_plan
        self._owners = trained.owners
        self.tables = tables
        self.row_optimizers = row_optimizers
        self.prefetcher = Prefetcher(
            peers,
            host_merge,
            self.tables,
            is_on=config.lookahead,
            # NCCL's groups must be used in one order, which two threads do not have.
            is_early=device.type == "cpu",
        )
        self.step = Step(self, PendingGradients(tables), set())
        self.num_steps = 0
        """Steps that are over: every optimizer has stepped in each."""
        self.dense = DenseRoute(peers, *dense_groups, config.bucket_megabytes, self.names)
        self.backward = Backward(self, device)
        try:
            self._place(trained, adaptive_plan.plan, config, device)
        except BaseException:  # No parameter has given its rows away yet.
            self.close()
            raise

    def _place(
        self, trained: TrainedModel, plan: Plan, config: Config, device: torch.device
    ) -> None:
        facts = trained.facts
        placement.make_real(trained.model, facts, plan, device, trained.optimizers)
        placement.spread(facts, plan, self.buffers.now(), self.peers)
        self.buffers.are_touched()
        chosen = []
        for fact in facts:
            route = plan[fact.name].route
            if route in (Route.SHARDED, Route.OBSERVED):
                table = SparseTable(fact.name, fact.parameter, self.peers, self)
                self.tables.add(table)
                if route is Route.SHARDED:
                    chosen.append(table)
            elif route is not Route.LOCAL:
                self._adopt_dense(fact.name, fact.parameter)
        if chosen:
            by_name = {fact.name: fact for fact in facts}
            placement.place_tables(self.tables, chosen, by_name, config, self.peers)
            self._tables_changed()

    def _adopt_dense(self, name: str, parameter: nn.Parameter, *, stray: bool = False) -> None:
        self.dense.adopt(name, parameter, stray=stray)
        self.backward.watch(name, parameter)

    @property
    def num_partitions(self) -> int:
        """The number of parts in which gradients of rows are pushed; the same on all workers."""
        return self._adaptive_plan.num_partitions

    def close(self) -> None:
        """Release the model and the optimizers. Tables whose rows are on other workers stay
        tables."""
        for each in self.row_optimizers.values():
            each.swap_back()
        self.backward.close()
        self.dense.close()
        for table in self.tables:
            table.release()
            if table.local and table.home in (Home.PARAMETER, Home.SHARDS):
                values = table.values("close")
                make_plain(table.parameter)
                set_data(table.parameter, values)
        self.prefetcher.close()

    # The loader (see BatchConsumer in data/loader.py) -------------------------------------

    def prefetches_here(self) -> bool:
        return self.prefetcher.is_followed()

    def reads_ahead(self, loader: int) -> bool:
        return self.prefetcher.reads_ahead(loader)

    def declare_random(self, loader: int) -> None:
        self.prefetcher.draws(loader)

    def declare_ids(self, loader: int, ids: dict[str, Callable[[Any], Any]]) -> None:
        self.prefetcher.declare(loader, ids)

    def begin_batch(
        self, of: Pass, batch: Any, following: tuple[Any, ...], counts: list[int]
    ) -> None:
        self.weight.set_counts(counts)
        self.step.prefetch(of, batch, following)

    def end_data(self) -> None:
        self.weight.forget_counts()
        self.step.end_data()

    # A step -------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Put tables back that an exception in `optimizer.step()` has left out of it."""
        for optimizer in self.row_optimizers.values():
            if optimizer.is_stepping:
                optimizer.swap_back()

    def arm(self) -> None:
        """Prepare for a reduction. Collective if a checkpoint is saved here."""
        self.save_points.before_reduction()
        self.dense.arm()

    def reduce(self, backward_seconds: float) -> None:
        """Reduce the gradients of all workers. Collective."""
        self.step.reduce(backward_seconds)

    def end_reduction(self, buffers_changed: bool, save_called: bool) -> None:
        """Take what workers have told each other in a reduction; the same on all workers."""
        if buffers_changed:
            self.buffers.mark_changed()
        if save_called:
            self.save_points.call_save()

    def follow_options(self, optimizer: Optimizer) -> None:
        """Give tables the row rule that their options of the moment need."""
        changed = self.row_optimizers[id(optimizer)].follow_options(
            self.tables.groups_of(optimizer)
        )
        if changed:  # Rows that came early for the next batch may change in this step after all.
            self.prefetcher.always_changes(changed)
            for name in changed:
                self._adaptive_plan.set_row_rule(name, RowRule.EVERY_ROW)

    def end_step(self) -> None:
        """Complete a step before it is counted. Collective if buffers have changed."""
        self.dense.settle()
        self.tables.retire()
        self.buffers.broadcast_changes(self.peers)

    def settle(self) -> None:
        """Begin another step: every optimizer has stepped."""
        self.weight.end_step()
        self.prefetcher.updated()
        self.num_steps += 1
        for group in self.tables.groups:
            group.carried |= group.graded
        self.step = self.step.settle()

    def drop_gradients(self) -> None:
        """Drop all gradients of tables, also those that are not reduced yet."""
        for table in self.tables:
            table.set_gradient(None)

    # Routes -------------------------------------------------------------------------------

    def place_observed(self, used: set[str], whole: set[str]) -> list[SparseTable]:
        """Decide the route of observed parameters, and return those that are sharded now.
        Collective.

        `used` and `whole` are those that any worker has used, and used as a whole.
        """
        new = []
        for table in self.tables:
            if table.home is Home.PARAMETER and table.name in used:
                if table.name in whole:
                    self.densify(table, "another worker", is_planned=False)
                else:
                    new.append(table)
        if new:
            self._shard(new)
            for table in new:
                self._adaptive_plan.set_route(
                    table.name, Route.SHARDED, "only rows of it were looked up"
                )
        return new

    def _shard(self, tables: Sequence[SparseTable]) -> None:
        """Shard tables of which every worker has all rows: keep only this owner's."""
        groups = self.tables.shard(tables)
        for group in groups:
            for number, parameter in enumerate(group.parameters):
                table = self.tables.by_id[id(parameter)]
                group.shard(number).copy_(table.own_part(table.values("sharding")))
        self.tables.enter(groups)
        self._tables_changed()

    def densify(self, table: SparseTable, why: str, *, is_planned: bool) -> None:
        """Make a table a dense parameter. Collective if it is sharded."""
        was_sharded = table.group is not None
        self.tables.leave(table, why)
        self.densified.add(table.name)
        if not is_planned:
            if was_sharded:
                warn_whole(table.name, why)
            self._adaptive_plan.hold(table.name)
            why = f"used whole by {why}"
        owner = self._owners.get(id(table.parameter))
        if owner is not None:
            refuse_dense(table.name, owner[0], why)
        route = Route.ALL_REDUCE if self.peers.num_workers > 1 else Route.LOCAL
        self._adaptive_plan.set_route(table.name, route, why)
        self._adopt_dense(table.name, table.parameter, stray=True)
        self._tables_changed()

    def move(self, change: MoveTable) -> None:
        """Move a table to another route, between two steps. Collective."""
        table = self.tables.by_name[change.name]
        if change.route is Route.ALL_REDUCE:
            self.densify(table, change.why, is_planned=True)
            return
        self.dense.release(table.name)
        self.backward.unwatch(table.name)
        self.densified.discard(table.name)
        parameter = table.parameter
        gradient, parameter.grad = parameter.grad, None
        self._shard([table])
        if gradient is not None:  # Gradients stay until they are zeroed, as in torch.
            part = table.own_part(gradient)
            rows = any_in_row(part != 0).nonzero().squeeze(1)
            assert table.group is not None
            table.group.receive([table.number], rows, part[rows])
            table.group.carried.add(table.number)
        self._adaptive_plan.set_route(table.name, change.route, change.why)

    def _tables_changed(self) -> None:
        self.prefetcher.tables_changed()
        self.step.tables_changed()
