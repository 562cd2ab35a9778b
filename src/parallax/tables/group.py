"""The storage of tables of a kind, and the update of their rows.

[Note: group] Tables of one dtype, row shape and device whose parameters are in the same group of
the same optimizer share one storage for rows, one for each state of the optimizer, and one
gradient. Each table's shard is a contiguous block of them, and `optimizer.state[weight]` holds
views. Options that differ between tables are those of different groups of the optimizer, so their
tables are in different groups here as well.

[Note: counters] State that has no element for each row, as Adam's `step`, belongs to a table, not
to the group: a table that gets no gradient in a step does not count it. Tables whose counters are
equal share one tensor for each and are updated together; the others are updated apart.

[Note: row rules] A group has one of two. *Touched rows*: they and their state are gathered into a
small parameter on which the optimizer steps, and scattered back (`RowUpdate`). *Every row*: the
optimizer steps on the storage itself, with a dense gradient that is zero in untouched rows
(`ShardUpdate`). The second one needs no message: with a zero gradient, the update of a row depends
on nothing but the row, its state and the options. Tables without a gradient are skipped under both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.planning.plan import RowRule
from parallax.tables.merge import merged, put_rows
from parallax.tables.rowmap import RowMap


class TableGroup:
    """An owner's rows of several tables. See [Note: group]."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        maps: Sequence[RowMap],
        rank: int,
        device: torch.device,
        optimizer: Optimizer | None,
        rule: RowRule = RowRule.TOUCHED_ROWS,
    ) -> None:
        """Allocate the rows; they are filled by way of `shard`."""
        first = parameters[0]
        self.names = tuple(names)
        self.parameters = list(parameters)
        self.maps = list(maps)
        self.optimizer = optimizer
        self.rule = rule
        """Which rows a step changes. See [Note: row rules]."""
        self.offsets = [0]
        for row_map in maps:
            self.offsets.append(self.offsets[-1] + row_map.size_of(rank))
        shape = (self.offsets[-1], *first.shape[1:])
        self.rows = torch.empty(shape, dtype=first.dtype, device=device)
        self.graded: set[int] = set()
        """Tables that have a gradient; the same on all workers."""
        self.carried: set[int] = set()
        """Those of them whose gradient an update has taken already, or that is of an earlier step.
        It stays until it is zeroed."""
        self._rank = rank
        self._gradient: tuple[Tensor, Tensor] | None = None
        self._in_gradient: set[int] = set()
        """Tables that have rows in the gradient."""
        self._has_values: set[int] = set()
        """Those whose rows there count; other graded tables have a zero gradient."""
        self._dense_gradient: Tensor | None = None
        """Under the rule for every row; zero between two updates."""
        self._filled_rows: Tensor | None = None
        """Its rows that are not zero, during an update."""
        self._state: dict[str, Tensor] = {}
        self._views: list[dict[str, Tensor]] = [{} for _ in parameters]
        self._cohort: list[int] = []
        """The tables of the last update, if all that had a gradient were updated together."""

    def shard(self, table: int) -> Tensor:
        """Return a view of a table's rows here."""
        return self.rows[self.offsets[table] : self.offsets[table + 1]]

    # Gradients ----------------------------------------------------------------------------

    def receive(self, tables: Iterable[int], rows: Tensor, values: Tensor) -> None:
        """Add gradients of some rows, distinct and sorted, to what there is."""
        before = self.gradient
        if before is not None:
            rows, values = merged([before[0], rows], [before[1], values])
        self._gradient = rows, values
        tables = set(tables)
        self.graded |= tables
        self._has_values |= tables
        self._in_gradient |= tables

    @property
    def gradient(self) -> tuple[Tensor, Tensor] | None:
        """The rows that have a gradient, sorted, and their gradients."""
        if self._in_gradient != self._has_values and self._gradient is not None:
            rows, values = self._gradient
            parts = [self._range(rows, table) for table in sorted(self._has_values)]
            chosen = [torch.arange(*part, device=rows.device) for part in parts]
            kept = torch.cat(chosen) if chosen else None
            self._gradient = None if kept is None else (rows[kept], values[kept])
            self._in_gradient = set(self._has_values)
        return self._gradient

    def gradient_of(self, table: int) -> tuple[Tensor, Tensor] | None:
        """Return one table's part of it, with rows counted in its shard. Values are a view."""
        found = self.gradient
        if found is None or table not in self.graded:
            return None
        rows, values = found
        if len(self.parameters) == 1:
            return found
        first, end = self._range(rows, table)
        return rows[first:end] - self.offsets[table], values[first:end]

    def zero(self, table: int) -> None:
        """Make a table's gradient zero. The optimizer steps with it, as in torch."""
        self.carried.discard(table)
        self._has_values.discard(table)

    def drop(self, table: int) -> None:
        """Leave a table without a gradient. The optimizer skips it."""
        self.graded.discard(table)
        self.carried.discard(table)
        self._has_values.discard(table)

    def _range(self, rows: Tensor, table: int) -> tuple[int, int]:
        edges = torch.tensor(self.offsets[table : table + 2], device=rows.device)
        first, end = torch.searchsorted(rows, edges).tolist()
        return first, end

    # Updates ------------------------------------------------------------------------------

    def begin_update(self, *, is_state_known: bool) -> Sequence[Update]:
        """Return stand-ins for the tables that have a gradient, ready for the optimizer's step.

        `is_state_known`: the optimizer's state has the same tensors as after the last update.
        """
        if not self.graded:
            return []
        cohorts = [self._cohort]
        if not is_state_known or self.graded != set(self._cohort):
            cohorts = self._cohorts()
            self._cohort = cohorts[0] if len(cohorts) == 1 else []
        if self.rule is RowRule.EVERY_ROW:
            gradient = self._scattered()
            return [ShardUpdate(self, run, gradient) for each in cohorts for run in _runs(each)]
        rows, values = self._touched()
        if len(cohorts) == 1:
            return [RowUpdate(self, cohorts[0], rows, values)]
        found = []
        for tables in cohorts:
            parts = [self._range(rows, table) for table in tables]
            chosen = torch.cat([torch.arange(*part, device=rows.device) for part in parts])
            found.append(RowUpdate(self, tables, rows[chosen], values[chosen]))
        return found

    def end_update(self, *, is_gradient_kept: bool) -> None:
        """The optimizer has stepped, or will not: clear the dense gradient.

        `is_gradient_kept`: this optimizer does not write into gradients.
        """
        if self._dense_gradient is None:
            return
        if is_gradient_kept:
            if self._filled_rows is not None:
                self._dense_gradient.index_fill_(0, self._filled_rows, 0.0)
        else:
            self._dense_gradient.zero_()
        self._filled_rows = None

    def _touched(self) -> tuple[Tensor, Tensor]:
        """Return the rows that have a gradient, and their gradients; there may be none."""
        found = self.gradient
        if found is not None:
            return found
        return torch.empty(0, dtype=torch.int64, device=self.rows.device), self.rows[:0]

    def _scattered(self) -> Tensor:
        """Return the gradient of all rows here."""
        if self._dense_gradient is None:
            self._dense_gradient = torch.zeros_like(self.rows)
        rows, values = self._touched()
        put_rows(self._dense_gradient, rows, values)
        self._filled_rows = rows
        return self._dense_gradient

    def _cohorts(self) -> list[list[int]]:
        """Return the tables with a gradient, those with equal counters together."""
        found: dict[Any, list[int]] = {}
        others: set[Any] = set()
        for table in range(len(self.parameters)):
            counters = self._adopt_state(table)
            # A table that has no state yet (momentum, at first) must begin it apart from others.
            key = tuple(
                (name, id(value) if isinstance(value, Tensor) else value)
                for name, value in counters.items()
            ) + tuple(name for name in self._state_of(table) if name not in counters)
            if table in self.graded:
                found.setdefault(key, []).append(table)
            else:
                others.add(key)
        if len(found) > 1:
            return list(self._united(found).values())
        for key, tables in found.items():
            if key in others:  # Tables without a gradient do not count this step.
                self._share_counters(tables)
        return list(found.values())

    def _adopt_state(self, table: int) -> dict[str, Any]:
        """Make a table's state views of the group's, if a script has put others there; return the
        rest of the state."""
        if self.optimizer is None:
            return {}
        parameter, views = self.parameters[table], self._views[table]
        state = self.optimizer.state.get(parameter)
        if not state:
            return {}
        counters = {}
        for key, value in state.items():
            if views.get(key) is value and value is not None:
                continue
            if not isinstance(value, Tensor) or value.dim() == 0:
                counters[key] = value
                continue
            row_map = self.maps[table]
            if value.shape == parameter.shape and len(value) != row_map.size_of(self._rank):
                value = row_map.part(value, self._rank)
            if value.shape == (row_map.size_of(self._rank), *parameter.shape[1:]):
                state[key] = self.state_view(table, key, value.dtype)
                state[key].copy_(value)
            else:
                counters[key] = value
        return counters

    def state_view(self, table: int, key: str, dtype: torch.dtype) -> Tensor:
        """Return a view of a table's part of a state that has an element for each of its rows'."""
        view = self._views[table].get(key)
        if view is not None and view.dtype == dtype:
            return view
        storage = self._state.get(key)
        if storage is None or storage.dtype != dtype:
            storage = self._state[key] = torch.zeros_like(self.rows, dtype=dtype)
        view = storage[self.offsets[table] : self.offsets[table + 1]]
        self._views[table][key] = view
        return view

    def _united(self, found: dict[Any, list[int]]) -> dict[Any, list[int]]:
        """Let tables share counters that are equal, as after a checkpoint was loaded."""
        by_value: dict[Any, list[int]] = {}
        for tables in found.values():
            by_value.setdefault(self._counter_values(tables[0]), []).extend(tables)
        for tables in by_value.values():
            tables.sort()
            self._share_counters(tables)
        return by_value

    def _state_of(self, table: int) -> dict[str, Any]:
        if self.optimizer is None:
            return {}
        state: dict[str, Any] = self.optimizer.state.get(self.parameters[table], {})
        return state

    def _counter_values(self, table: int) -> Any:
        state = self._state_of(table)
        values: list[Any] = []
        for key, value in state.items():
            if self._views[table].get(key) is value:
                values.append(key)
            elif not isinstance(value, Tensor):
                values.append((key, value))
            elif value.numel() == 1 and value.device.type == "cpu":
                values.append((key, float(value)))
            else:  # To read it would make a GPU wait.
                values.append((key, id(value)))
        return tuple(values)

    def _share_counters(self, tables: list[int]) -> None:
        """Give some tables counters of their own, equal to those of the first of them."""
        assert self.optimizer is not None
        first = self.optimizer.state.get(self.parameters[tables[0]], {})
        shared = {
            key: copied(value)
            for key, value in first.items()
            if self._views[tables[0]].get(key) is not value
        }
        for table in tables:
            if shared:
                self.optimizer.state[self.parameters[table]].update(shared)

    # Leaving ------------------------------------------------------------------------------

    def release_state(self, table: int) -> dict[str, Tensor]:
        """Return the views of a table's state, by key; counters become the table's own."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state.get(self.parameters[table], {})
        for key, value in self._adopt_state(table).items():
            state[key] = copied(value)
        return {key: view for key, view in self._views[table].items() if state.get(key) is view}

    def without(self, table: int) -> TableGroup | None:
        """Return a group of the other tables, with their rows, state and gradients."""
        kept = [other for other in range(len(self.parameters)) if other != table]
        if not kept:
            return None
        parameters = [self.parameters[other] for other in kept]
        maps = [self.maps[other] for other in kept]
        names = [self.names[other] for other in kept]
        group = TableGroup(
            names, parameters, maps, self._rank, self.rows.device, self.optimizer, self.rule
        )
        for number, other in enumerate(kept):
            group.shard(number).copy_(self.shard(other))
            for key, view in self.release_state(other).items():
                moved = group.state_view(number, key, view.dtype)
                assert self.optimizer is not None
                self.optimizer.state[self.parameters[other]][key] = moved.copy_(view)
        self.drop(table)
        if self.gradient is not None:
            rows, values = self.gradient
            gap = self.offsets[table + 1] - self.offsets[table]
            group._gradient = rows - gap * (rows >= self.offsets[table + 1]), values
        group.graded = {kept.index(other) for other in self.graded}
        group.carried = {kept.index(other) for other in self.carried}
        group._has_values = {kept.index(other) for other in self._has_values}
        group._in_gradient = set(group._has_values)
        return group


class RowUpdate:
    """Touched rows of a group as a dense parameter, on which the user's optimizer steps."""

    def __init__(self, group: TableGroup, tables: list[int], rows: Tensor, values: Tensor) -> None:
        assert group.optimizer is not None
        self.tables = tables
        self._group = group
        self._rows = rows
        self._states = group.optimizer.state
        self.names = {group.names[table] for table in tables}
        self.parameter = nn.Parameter(group.rows.index_select(0, rows))
        is_sparse = isinstance(group.optimizer, torch.optim.SparseAdam)
        self.parameter.grad = _as_sparse(values) if is_sparse else values
        state = self._states.get(group.parameters[tables[0]])
        if state:
            views = group._views[tables[0]]
            self._states[self.parameter] = {
                key: group._state[key].index_select(0, rows)
                if views.get(key) is value
                else copied(value)
                for key, value in state.items()
            }

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the rows and their state to the group's storage."""
        group, stepped = self._group, self.parameter.detach()
        put_rows(group.rows, self._rows, stepped)
        first = self._states[group.parameters[self.tables[0]]]
        for key, value in self._states.get(self.parameter, {}).items():
            known = first.get(key)
            if is_by_row(value, stepped):
                if known is None:
                    self._make_state(key, value.dtype)
                put_rows(group._state[key], self._rows, value)
            elif isinstance(known, Tensor) and isinstance(value, Tensor):
                known.copy_(value)  # One tensor for all of them. See [Note: counters].
            else:
                for table in self.tables:
                    self._states[group.parameters[table]][key] = value
        group.carried.update(self.tables)

    def _make_state(self, key: str, dtype: torch.dtype) -> None:
        for table in self.tables:
            view = self._group.state_view(table, key, dtype).zero_()
            self._states[self._group.parameters[table]][key] = view

    def discard(self) -> None:
        """Forget a step that was not taken to its end."""
        self._states.pop(self.parameter, None)


class ShardUpdate:
    """The rows of tables that stand side by side as a parameter, on which the optimizer steps."""

    def __init__(self, group: TableGroup, tables: list[int], gradient: Tensor) -> None:
        """`tables` have equal counters; `gradient` is that of the whole group."""
        assert group.optimizer is not None
        self.tables = tables
        self.names = {group.names[table] for table in tables}
        self._group = group
        self._states = group.optimizer.state
        self._part = slice(group.offsets[tables[0]], group.offsets[tables[-1] + 1])
        self.parameter = nn.Parameter(group.rows[self._part])
        self.parameter.grad = gradient[self._part]
        self._given: dict[str, Tensor] = {}
        """State that is in the group's storage already."""
        state = self._states.get(group.parameters[tables[0]])
        if state:
            views = group._views[tables[0]]
            self._given = {
                key: group._state[key][self._part]
                for key, value in state.items()
                if views.get(key) is value
            }
            self._states[self.parameter] = {
                key: self._given[key] if key in self._given else copied(value)
                for key, value in state.items()
            }

    @torch.no_grad()
    def write_back(self) -> None:
        """Take over what the optimizer has made anew; rows that it changed in place stay there."""
        group, rows = self._group, self._group.rows[self._part]
        if self.parameter.data_ptr() != rows.data_ptr():  # It assigned other data.
            rows.copy_(self.parameter.detach())
        first = self._states[group.parameters[self.tables[0]]]
        for key, value in self._states.get(self.parameter, {}).items():
            known = first.get(key)
            if value is self._given.get(key):
                continue
            if is_by_row(value, self.parameter):
                self._keep_state(key, value)
            elif isinstance(known, Tensor) and isinstance(value, Tensor):
                known.copy_(value)  # One tensor for all of them. See [Note: counters].
            else:
                for table in self.tables:
                    self._states[group.parameters[table]][key] = value
        group.carried.update(self.tables)

    def _keep_state(self, key: str, value: Tensor) -> None:
        group = self._group
        if key not in group._state and len(value) == len(group.rows) and self._is_fresh(value):
            group._state[key] = value  # It is the storage from now on.
        views = [group.state_view(table, key, value.dtype) for table in self.tables]
        group._state[key][self._part].copy_(value)
        for table, view in zip(self.tables, views, strict=True):
            self._states[group.parameters[table]][key] = view

    def _is_fresh(self, value: Tensor) -> bool:
        """Whether nothing else uses the memory: an optimizer may keep the gradient itself."""
        others = (self._group.rows, self._group._dense_gradient)
        used = {each.untyped_storage().data_ptr() for each in others if each is not None}
        return value.is_contiguous() and value.untyped_storage().data_ptr() not in used

    def discard(self) -> None:
        """Forget a step that was not taken to its end."""
        self._states.pop(self.parameter, None)


Update = RowUpdate | ShardUpdate


def has_zero_gradient(update: Update) -> bool:
    """Whether a script has zeroed the gradient of a stand-in."""
    gradient = update.parameter.grad
    assert gradient is not None
    return not bool((gradient._values() if gradient.is_sparse else gradient).any())


def _runs(tables: list[int]) -> Iterator[list[int]]:
    """Cut sorted tables into runs that stand side by side in the storage."""
    for _, run in itertools.groupby(enumerate(tables), lambda each: each[1] - each[0]):
        yield [table for _, table in run]


def is_by_row(value: object, like: Tensor) -> bool:
    """Whether a part of an optimizer's state has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == like.shape


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _as_sparse(values: Tensor) -> Tensor:
    places = torch.arange(len(values), device=values.device)[None]
    return torch.sparse_coo_tensor(
        places, values, values.shape, is_coalesced=True, check_invariants=False
    )
