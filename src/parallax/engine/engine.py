"""What lasts from step to step: tables, routes, and the step that is under way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.analysis import Facts
from parallax.comm.host_merge import HostMerge
from parallax.comm.peers import Peers
from parallax.comm.request import LastRequest
from parallax.config import Config
from parallax.course import Course
from parallax.engine import placement
from parallax.engine.backward import Backward
from parallax.engine.buffers import Buffers
from parallax.engine.dense import DenseRoute
from parallax.engine.prefetcher import Pass, Prefetcher
from parallax.engine.row_optimizer import RowOptimizer, refuse_dense
from parallax.engine.sparse_table import Home, SparseTable, warn_whole
from parallax.engine.step import Step
from parallax.engine.table_set import Owners, TableSet
from parallax.engine.weight import Weight
from parallax.plan import Plan, Route
from parallax.tables.merge import any_in_row
from parallax.tables.table import make_plain, set_data
from parallax.wire import rounded

_log = logging.getLogger("parallax")


class SavePoints(Protocol):
    """Who saves checkpoints by schedule."""

    def wants_save(self) -> bool:
        """Whether this worker calls all to a save after this step."""

    def before_reduction(self) -> None:
        """The gradients of all workers begin to come together."""


class Engine:
    """Trains the parameters of one session, each on its route."""

    def __init__(
        self,
        model: nn.Module,
        facts: Sequence[Facts],
        owners: Owners,
        optimizers: Sequence[Optimizer],
        config: Config,
        peers: Peers,
        host_merge: HostMerge,
        course: Course,
        save_points: SavePoints,
        dense_groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
        device: torch.device,
    ) -> None:
        """Put every parameter on its route. Collective."""
        self.names = [fact.name for fact in facts]
        self.peers = peers
        self.host_merge = host_merge
        self.save_points = save_points
        self.weight = Weight(peers)
        self.buffers = Buffers(model)
        self.requests = LastRequest()
        self.buffers_changed = False
        self.save_called = False
        """Whether any worker has called all to a save; all learn it in the same reduction."""
        self.densified: set[str] = set()
        """Tables that have become ordinary parameters."""
        self._course = course
        self._owners = owners
        plan = course.plan
        paddings = {fact.name: fact.padding_rows for fact in facts}
        self.tables = TableSet(peers, owners, device, paddings)
        self.prefetcher = Prefetcher(
            peers,
            host_merge,
            self.tables,
            is_on=config.lookahead,
            # NCCL's groups must be used in one order, which two threads do not have.
            is_early=device.type == "cpu",
        )
        self.step = Step(self)
        self.backward = Backward(self, device)
        self.dense = DenseRoute(
            peers,
            *dense_groups,
            config.bucket_megabytes,
            self.backward.begin,
            self.weight.scale,
            self.names,
        )
        self.row_optimizers = {id(each): RowOptimizer(each) for each in optimizers}
        if peers.detours is not None:
            peers.detours.serve = self.served
        try:
            placement.make_real(model, facts, plan, device, optimizers)
            placement.spread(facts, plan, self.buffers.now(), peers)
            self.buffers.are_touched()
            self._place(facts, config, plan)
        except BaseException:  # No parameter has given its rows away yet.
            self.close()
            raise

    def _place(self, facts: Sequence[Facts], config: Config, plan: Plan) -> None:
        chosen = []
        for fact in facts:
            route = plan[fact.name].route
            if route in (Route.SHARDED, Route.OBSERVED):
                table = SparseTable(fact.name, fact.parameter, self.peers, self)
                self.tables.add(table)
                if route is Route.SHARDED:
                    chosen.append(table)
            elif route is not Route.LOCAL:
                self.dense.adopt(fact.name, fact.parameter)
        if chosen:
            by_name = {fact.name: fact for fact in facts}
            placement.place_tables(self.tables, chosen, by_name, config, self.peers)
            self._tables_changed()

    @property
    def num_partitions(self) -> int:
        """In how many parts a push goes; the same on all workers."""
        return self._course.num_partitions

    def close(self) -> None:
        """Give the model and the optimizers back. Tables of which other workers have rows stay
        tables."""
        for each in self.row_optimizers.values():
            each.swap_back()
        self.dense.close()
        for table in self.tables:
            table.release()
            if table.local and table.home in (Home.PARAMETER, Home.SHARDS):
                values = table.values("close")
                make_plain(table.parameter)
                set_data(table.parameter, values)
        self.prefetcher.close()

    # The loader ---------------------------------------------------------------------------

    def is_followed(self) -> bool:
        return self.prefetcher.is_followed()

    def reads_ahead(self, loader: int) -> bool:
        return self.prefetcher.reads_ahead(loader)

    def draws(self, loader: int) -> None:
        self.prefetcher.draws(loader)

    def declare(self, loader: int, ids: dict[str, Callable[[Any], Any]]) -> None:
        self.prefetcher.declare(loader, ids)

    def prefetch(self, of: Pass, batch: Any, following: tuple[Any, ...]) -> None:
        self.step.prefetch(of, batch, following)

    def end_data(self) -> None:
        self.step.end_data()

    # A step -------------------------------------------------------------------------------

    def arm(self) -> None:
        """The gradients of all workers begin to come together."""
        self.save_points.before_reduction()
        self.dense.arm()

    def end_reduction(self, buffers_changed: bool, save_called: bool) -> None:
        self.buffers_changed |= buffers_changed
        self.save_called |= save_called

    def reduce(self, backward_seconds: float) -> None:
        """Bring the gradients of all workers together. Collective."""
        self.step.reduce(backward_seconds)

    def begin_update(self, optimizer: Optimizer) -> None:
        """Put the rows that have a gradient in their tables' place in an optimizer."""
        self.row_optimizers[id(optimizer)].swap_in(self.tables.groups_of(optimizer))

    def end_update(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""
        groups = self.tables.groups_of(optimizer)
        again = {group.names[table] for group in groups for table in group.applied}
        names = self.row_optimizers[id(optimizer)].swap_out()
        self.step.updated(names, again & names)

    def give_up_updates(self) -> None:
        """Put tables back that an exception has left out of their optimizers."""
        for each in self.row_optimizers.values():
            each.swap_back()

    def end_step(self) -> None:
        """The number of steps grows."""
        self.dense.settle()
        self.tables.retire()

    def settle(self) -> None:
        """Every optimizer has stepped: another step begins."""
        self.weight.end_step()
        self.prefetcher.updated()
        self.step = self.step.following()

    def drop_gradients(self) -> None:
        for table in self.tables:
            table.zero()  # also what no backward has reduced yet

    # Routes -------------------------------------------------------------------------------

    def place_observed(self, used: set[str], whole: set[str]) -> list[SparseTable]:
        """All workers know which observed parameters were used whole by any of them. Return those
        that are sharded from now on."""
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
                self._course.reroute(table.name, Route.SHARDED, "only rows of it were looked up")
        return new

    def _shard(self, tables: Sequence[SparseTable]) -> None:
        """Keep only this owner's rows of tables that every worker has whole."""
        groups = self.tables.shard(tables)
        for group in groups:
            for number, parameter in enumerate(group.parameters):
                table = self.tables.by_id[id(parameter)]
                group.shard(number).copy_(table.own_part(table.values("sharding")))
        self.tables.enter(groups)
        self._tables_changed()

    def densify(self, table: SparseTable, why: str, *, is_planned: bool) -> None:
        """Make a table an ordinary parameter. Collective if its rows lie in shards."""
        was_sharded = table.group is not None
        self.tables.leave(table, why)
        self.densified.add(table.name)
        if not is_planned:
            if was_sharded:
                warn_whole(table.name, why)
            self._course.hold(table.name)
            why = f"used whole by {why}"
        owner = self._owners.get(id(table.parameter))
        if owner is not None:
            refuse_dense(table.name, owner[0], why)
        route = Route.ALL_REDUCE if self.peers.num_workers > 1 else Route.LOCAL
        self._course.reroute(table.name, route, why)
        self.dense.adopt(table.name, table.parameter, stray=True)
        self._tables_changed()

    def move(self, table: SparseTable, route: Route, why: str) -> None:
        """Bring a table to another route, between two steps."""
        if route is Route.ALL_REDUCE:
            self.densify(table, why, is_planned=True)
            return
        self.dense.release(table.name)
        self.densified.discard(table.name)
        parameter = table.parameter
        gradient, parameter.grad = parameter.grad, None
        self._shard([table])
        if gradient is not None:  # It stays until it is zeroed, as in torch.
            part = table.own_part(gradient)
            rows = any_in_row(part != 0).nonzero().squeeze(1)
            assert table.group is not None
            table.group.receive([table.number], rows, part[rows])
            table.group.applied.add(table.number)
        self._course.reroute(table.name, route, why)

    def served(self, name: str, places: Tensor) -> Tensor:
        """Return rows of a table that this worker owns."""
        shard = self.tables.by_name[name].shard
        assert shard is not None
        return rounded(shard.index_select(0, places.to(shard.device)), self.peers.wire)

    def _tables_changed(self) -> None:
        self.prefetcher.tables_changed()
        self.step.tables_changed()
