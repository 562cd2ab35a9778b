"""Lookups foreseen from the batch: which of its tensors reach which table, and the rows ahead.

A table is foreseen for a loader when on every worker the ids of its lookups were the same parts of
two batches in a row; workers tell each other in the reduction at the end of a backward. From then
on the rows of all such tables come together, and one batch ahead. See [Note: lookahead] in
exchange/ahead.py and [Note: detour] in exchange/peers.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallax.exchange.ahead import Ahead, Want
from parallax.exchange.courier import Courier
from parallax.exchange.header import Verb
from parallax.exchange.peers import Peers
from parallax.exchange.request import Request
from parallax.recipe import Recipe, find_recipe, leaves_of
from parallax.sparse import TableRows

NEXT_BATCH = "the next batch"
_MAX_DETOURS = 2
Recipes = dict[str, tuple[Recipe, ...]]


class Foresight:
    """What a session knows of its batches and lookups."""

    def __init__(self, peers: Peers, tables: Mapping[str, TableRows], *, is_on: bool) -> None:
        self._peers = peers
        self._tables = tables
        self._is_on = is_on and peers.num_workers > 1
        self._agreed: dict[int, Recipes] = {}
        """By loader: the tables that are foreseen."""
        self._before: dict[int, Recipes] = {}
        """By loader: what was found in the batch before."""
        self._detours: dict[str, int] = {}
        self._loader: int | None = None
        self._thread = 0
        self._leaves: list[Tensor] = []
        self._found: dict[str, list[Recipe | None]] = {}
        self._courier = Courier()
        self._ahead: Ahead | None = None
        self._ahead_of: int | None = None
        self._number = 0
        self._may_detour = False

    # From the loader ----------------------------------------------------------------------

    def reads_ahead(self, loader: int) -> bool:
        """Whether the batch after the next one is of use; the same on all workers."""
        return bool(self._agreed.get(loader))

    def hand_out(self, loader: int, batch: Any, following: tuple[Any, ...]) -> None:
        """The script gets a batch; `following` is the one after it, if it has been read."""
        if not self._is_on:
            return
        self._meet()
        self._loader, self._thread = loader, threading.get_ident()
        self._leaves, self._found = leaves_of(batch), {}
        agreed = self._agreed.get(loader, {})
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._ahead_of != loader:
            ahead.complete()  # All workers do: the rows of a batch that the script will not have.
            ahead = None
        if agreed:
            ahead = ahead or self._asked(agreed, batch)
            for order, rows in ahead.complete():
                if order.stock.shard is not None:
                    self._tables[order.stock.name].foresee(order.slots, rows, order.places)
            self._may_detour = True
            if following:
                self._ahead, self._ahead_of = self._asked(agreed, following[0]), loader
                self._ahead.send_early(self._courier)

    def close(self) -> None:
        self._courier.close()

    def end(self) -> None:
        """The loader has ended."""
        if self._is_on:
            self._meet()
            self._loader, self._leaves = None, []

    def _meet(self) -> None:
        """Let a worker on a detour be served before the others wait for it elsewhere."""
        if self._may_detour:
            self._may_detour = False
            self._peers.announce(self._peers.operation(Verb.MEETING, NEXT_BATCH))

    # From lookups -------------------------------------------------------------------------

    def looked_up(self, table: TableRows, ids: Any) -> None:
        """A lookup that was not foreseen: see where its ids come from."""
        known = self._is_on and self._loader is not None and isinstance(ids, Tensor)
        if known and self._thread == threading.get_ident():
            self._found.setdefault(table.name, []).append(find_recipe(ids, self._leaves))

    def detoured(self, table: TableRows) -> None:
        """Some worker's ids were not as foreseen; all workers know."""
        self._detours[table.name] = self._detours.get(table.name, 0) + 1
        for agreed in self._agreed.values():
            agreed.pop(table.name, None)

    # From the reduction -------------------------------------------------------------------

    def blind(self) -> list[bool]:
        """For each table: whether this worker cannot foresee it."""
        return [not self._sees(name) for name in self._tables]

    def settle(self, blind: list[bool]) -> None:
        """`blind` is what any worker said: the same on all."""
        self._may_detour = False
        if self._loader is None:
            return
        now = self._recipes()
        agreed = self._agreed.setdefault(self._loader, {})
        for name, is_blind in zip(self._tables, blind, strict=True):
            if is_blind:
                agreed.pop(name, None)
            elif name in now and name not in agreed:
                agreed[name] = now[name]
        self._before[self._loader] = now

    def _sees(self, name: str) -> bool:
        if not self._is_on or self._loader is None or self._tables[name].shard is None:
            return False
        if self._detours.get(name, 0) > _MAX_DETOURS:
            return False
        if name in self._agreed.get(self._loader, {}):
            return True
        now = self._recipes().get(name)
        return now is not None and now == self._before.get(self._loader, {}).get(name)

    def _recipes(self) -> Recipes:
        """Of the tables all of whose lookups were found in the batch."""
        return {
            name: tuple(recipe for recipe in found if recipe is not None)
            for name, found in self._found.items()
            if None not in found
        }

    # Inside -------------------------------------------------------------------------------

    def _asked(self, agreed: Recipes, batch: Any) -> Ahead:
        leaves = leaves_of(batch)
        wants = [self._want(name, recipes, leaves) for name, recipes in agreed.items()]
        self._number += 1
        return Ahead(self._peers, wants, self._number)

    def _want(self, name: str, recipes: tuple[Recipe, ...], leaves: list[Tensor]) -> Want:
        table = self._tables[name]
        parts = [recipe.ids(leaves) for recipe in recipes]
        known = [part.reshape(-1) for part in parts if part is not None]
        if len(known) < len(parts) or table.shard is None:
            return Want(table, None)
        ids = torch.cat(known).to(table.parameter.device)
        request = Request.of(ids, table.row_map, wraps=False, device=table.parameter.device)
        return Want(table, None if request.is_faulty else request.slots)
