"""All tables of a session, the groups that they are in, and their slot space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallax.comm.compression import rounded
from parallax.comm.peers import Peers
from parallax.engine.sparse_table import Home, SparseTable
from parallax.planning.plan import RowRule
from parallax.tables.group import TableGroup
from parallax.tables.space import SlotSpace

Owners = Mapping[int, tuple[Optimizer, dict[str, Any]]]
"""id of a parameter → its optimizer, and its group there."""


class TableSet:
    """Tables by name. Groups and space change only when a table becomes sharded or dense."""

    def __init__(
        self,
        peers: Peers,
        owners: Owners,
        device: torch.device,
        paddings: Mapping[str, Sequence[int]],
        rules: Mapping[str, RowRule | None],
    ) -> None:
        self.by_name: dict[str, SparseTable] = {}
        self.by_id: dict[int, SparseTable] = {}
        self.groups: list[TableGroup] = []
        """A change makes another list, because a push may still use this one."""
        self.sharded: list[SparseTable] = []
        """In the order of the space."""
        self.positions: dict[str, int] = {}
        """By name: the number of a sharded table in the space."""
        self._peers = peers
        self._owners = owners
        self._device = device
        self._paddings = paddings
        self._rules = rules
        self._spaces: dict[str, SlotSpace] = {}
        self._rebuild()

    def add(self, table: SparseTable) -> None:
        self.by_name[table.name] = table
        self.by_id[id(table.parameter)] = table

    def __iter__(self) -> Iterator[SparseTable]:
        return iter(self.by_name.values())

    def shard(self, tables: Sequence[SparseTable]) -> list[TableGroup]:
        """Allocate groups for some tables. The caller fills the shards, then calls `enter`."""
        kinds: dict[Any, list[SparseTable]] = {}
        for table in tables:
            kinds.setdefault(self._kind(table), []).append(table)
        found = []
        for members in kinds.values():
            owner = self._owners.get(id(members[0].parameter))
            found.append(
                TableGroup(
                    [table.name for table in members],
                    [table.parameter for table in members],
                    [table.row_map for table in members],
                    self._peers.rank,
                    self._device,
                    None if owner is None else owner[0],
                    self._rules[members[0].name] or RowRule.TOUCHED_ROWS,
                )
            )
        return found

    def enter(self, groups: Sequence[TableGroup]) -> None:
        """The shards of these groups are filled: their tables are sharded from now on."""
        for group in groups:
            for number, parameter in enumerate(group.parameters):
                table = self.by_id[id(parameter)]
                self._shard_state(table, group, number)
                table.enter(group, number)
        self.groups = [*self.groups, *groups]
        self._rebuild()

    def leave(self, table: SparseTable, why: str) -> None:
        """Give a table's values and state to every worker, and close the gap. Collective."""
        group = table.group
        if group is None:
            table.leave(None, None)
            return
        values = table.values(why)
        gradient = self._whole_gradient(table, why)
        owner = self._owners.get(id(table.parameter))
        states = group.release_state(table.number)
        for key in sorted(states):
            assert owner is not None
            whole = table.gathered(states[key], f"the optimizer's {key}")
            owner[0].state[table.parameter][key] = whole
        smaller = group.without(table.number)
        table.leave(values, gradient)
        at = self.groups.index(group)
        kept = [] if smaller is None else [smaller]
        self.groups = [*self.groups[:at], *kept, *self.groups[at + 1 :]]
        if smaller is not None:
            for number, parameter in enumerate(smaller.parameters):
                self.by_id[id(parameter)].regroup(smaller, number)
        self._rebuild()

    def groups_of(self, optimizer: Optimizer) -> list[TableGroup]:
        return [group for group in self.groups if group.optimizer is optimizer]

    @property
    def changing(self) -> set[str]:
        """Names of sharded tables of which a step changes every row."""
        groups = (group for group in self.groups if group.rule is RowRule.EVERY_ROW)
        return {name for group in groups for name in group.names}

    def space_of(self, table: SparseTable) -> SlotSpace:
        """Return a space that has one table only, for a lookup that was not prefetched."""
        found = self._spaces.get(table.name)
        if found is None:
            found = SlotSpace([table.name], [table.row_map], [1], self._peers.rank, self._device)
            self._spaces[table.name] = found
        return found

    def owned_rows(self, table: str, places: Tensor) -> Tensor:
        """Return the rows at some places of this worker's shard, as they are sent."""
        shard = self.by_name[table].shard
        assert shard is not None
        return rounded(shard.index_select(0, places.to(shard.device)), self._peers.row_format)

    @property
    def storages(self) -> list[Tensor]:
        return [group.rows for group in self.groups]

    def retire(self) -> None:
        """A step is over: no lookup of a table that has become dense is under way any more."""
        for table in self.by_name.values():
            if table.home is Home.LEAVING:
                table.home = Home.DENSE

    def _rebuild(self) -> None:
        self.sharded = [self.by_id[id(p)] for group in self.groups for p in group.parameters]
        self.positions = {table.name: i for i, table in enumerate(self.sharded)}
        self.space = SlotSpace(
            [table.name for table in self.sharded],
            [table.row_map for table in self.sharded],
            [len(group.parameters) for group in self.groups],
            self._peers.rank,
            self._device,
            [self._paddings.get(table.name, ()) for table in self.sharded],
        )

    def _kind(self, table: SparseTable) -> Any:
        """Tables of one kind share a group. See [Note: group]."""
        parameter, owner = table.parameter, self._owners.get(id(table.parameter))
        kind = (parameter.dtype, parameter.shape[1:])
        rule = self._rules[table.name]
        return kind if owner is None else (*kind, id(owner[0]), id(owner[1]), rule)

    def _shard_state(self, table: SparseTable, group: TableGroup, number: int) -> None:
        """Keep only this owner's rows of a parameter's state."""
        owner = self._owners.get(id(table.parameter))
        if owner is None:
            return
        state = owner[0].state.get(table.parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == table.parameter.shape:
                view = group.state_view(number, key, value.dtype)
                if value.is_meta:  # Adagrad makes its state with the optimizer.
                    view.fill_(owner[0].defaults.get("initial_accumulator_value", 0.0))
                else:
                    view.copy_(table.own_part(value))
                state[key] = view

    def _whole_gradient(self, table: SparseTable, why: str) -> Tensor | None:
        """Return what earlier backwards of this step brought to the owners, as a dense gradient.

        It is the same on all workers, so that averaging it with what comes now keeps it.
        """
        if not table.has_gradient:
            return None
        shard, received = table.shard, table.received
        assert shard is not None
        part = torch.zeros_like(shard)
        if received is not None:
            part.index_copy_(0, *received)
        return table.gathered(part, why)
