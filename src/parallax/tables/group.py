"""The storage of tables of a kind, and the update of their rows.

[Note: group] Tables of one dtype, row shape and device whose parameters are in the same group of
the same optimizer share one storage for rows, one for each state of the optimizer, and one
gradient. Each table's shard is a contiguous block of them, and `optimizer.state[weight]` holds
views. Options that differ between tables are those of different groups of the optimizer, so their
tables are in different groups here as well.

[Note: counters] State that has no element for each row, as Adam's `step`, belongs to a table, not
to the group: a table that gets no gradient in a step does not count it. Tables whose counters are
equal share one tensor for each and are updated together; the others are updated apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
    ) -> None:
        """Allocate the rows; they are filled by way of `shard`."""
        first = parameters[0]
        self.names = tuple(names)
        self.parameters = list(parameters)
        self.maps = list(maps)
        self.optimizer = optimizer
        self.offsets = [0]
        for row_map in maps:
            self.offsets.append(self.offsets[-1] + row_map.size_of(rank))
        shape = (self.offsets[-1], *first.shape[1:])
        self.rows = torch.empty(shape, dtype=first.dtype, device=device)
        self.graded: set[int] = set()
        """Tables that have a gradient; the same on all workers."""
        self.applied: set[int] = set()
        """Those of them whose gradient an update has taken already. It stays until it is zeroed."""
        self._rank = rank
        self._gradient: tuple[Tensor, Tensor] | None = None
        self._has_stale = False
        """The gradient still has rows of tables that are not graded any more."""
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
        self.graded.update(tables)

    @property
    def gradient(self) -> tuple[Tensor, Tensor] | None:
        """The rows that have a gradient, sorted, and their gradients."""
        if self._has_stale and self._gradient is not None:
            rows, values = self._gradient
            parts = [self._range(rows, table) for table in sorted(self.graded)]
            chosen = torch.cat([torch.arange(*part, device=rows.device) for part in parts])
            self._gradient = rows[chosen], values[chosen]
            self._has_stale = False
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
        """Drop a table's gradient."""
        if table not in self.graded:
            return
        self.graded.discard(table)
        self.applied.discard(table)
        self._has_stale = bool(self.graded)
        if not self.graded:
            self._gradient = None

    def _range(self, rows: Tensor, table: int) -> tuple[int, int]:
        edges = torch.tensor(self.offsets[table : table + 2], device=rows.device)
        first, end = torch.searchsorted(rows, edges).tolist()
        return first, end

    # Updates ------------------------------------------------------------------------------

    def begin_update(self, *, is_state_known: bool) -> list[RowUpdate]:
        """Return the rows that have a gradient, ready for the optimizer's step.

        `is_state_known`: the optimizer's state has the same tensors as after the last update.
        """
        if not self.graded or self.gradient is None:
            return []
        if is_state_known and self.graded == set(self._cohort):
            return [RowUpdate(self, self._cohort, *self.gradient)]
        cohorts = self._cohorts()
        if len(cohorts) == 1:
            self._cohort = cohorts[0]
            return [RowUpdate(self, cohorts[0], *self.gradient)]
        self._cohort, found = [], []
        for tables in cohorts:
            rows, values = self.gradient
            parts = [self._range(rows, table) for table in tables]
            chosen = torch.cat([torch.arange(*part, device=rows.device) for part in parts])
            found.append(RowUpdate(self, tables, rows[chosen], values[chosen]))
        return found

    def _cohorts(self) -> list[list[int]]:
        """Return the tables with a gradient, those with equal counters together."""
        found: dict[Any, list[int]] = {}
        others: set[Any] = set()
        for table in range(len(self.parameters)):
            counters = self._adopt_state(table)
            key = tuple(
                (name, id(value) if isinstance(value, Tensor) else value)
                for name, value in counters.items()
            )
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

    def _counter_values(self, table: int) -> Any:
        assert self.optimizer is not None
        state = self.optimizer.state.get(self.parameters[table], {})
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
        group = TableGroup(names, parameters, maps, self._rank, self.rows.device, self.optimizer)
        for number, other in enumerate(kept):
            group.shard(number).copy_(self.shard(other))
            for key, view in self.release_state(other).items():
                moved = group.state_view(number, key, view.dtype)
                assert self.optimizer is not None
                self.optimizer.state[self.parameters[other]][key] = moved.copy_(view)
        self.zero(table)
        if self.gradient is not None:
            rows, values = self.gradient
            gap = self.offsets[table + 1] - self.offsets[table]
            group._gradient = rows - gap * (rows >= self.offsets[table + 1]), values
            group.graded = {kept.index(other) for other in self.graded}
            group.applied = {kept.index(other) for other in self.applied}
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
        group.applied.update(self.tables)

    def _make_state(self, key: str, dtype: torch.dtype) -> None:
        for table in self.tables:
            view = self._group.state_view(table, key, dtype).zero_()
            self._states[self._group.parameters[table]][key] = view

    def discard(self) -> None:
        """Forget a step that was not taken to its end."""
        self._states.pop(self.parameter, None)


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
