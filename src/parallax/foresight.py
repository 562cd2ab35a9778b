"""Lookups foreseen from the batch: which of its tensors reach which table, and the rows ahead.

A table is foreseen for a loader when on every worker the ids of its lookups were the same parts of
two batches in a row; workers tell each other in the reduction at the end of a backward. From then
on the rows of all such tables come together, and one batch ahead, until some worker is surprised.
See [Note: lookahead] in exchange/ahead.py and [Note: detour] in exchange/detour.py.

[Note: window] Lookups need no message from the moment a batch is handed out until its gradients are
reduced, or the loader ends. In this window no row changes, because every update needs a reduction,
and a worker whose ids are not as foreseen can be served by the others at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallax.exchange.ahead import Ahead, Want
from parallax.exchange.courier import Courier
from parallax.exchange.header import Operation, Verb
from parallax.exchange.neighbours import Errand, Neighbours
from parallax.exchange.peers import Peers
from parallax.exchange.request import Guess, Request
from parallax.recipe import Recipe, find_recipe, leaves_of
from parallax.sparse import TableRows

_MAX_SURPRISES = 2
Recipes = dict[str, tuple[Recipe, ...]]
Pass = tuple[int, int]
"""A loader's number, and that of the pass over it."""


AHEAD = "the rows"
"""What they are called in messages."""


@dataclass(frozen=True)
class _Coming:
    """Rows of a batch on their way."""

    operation: Operation
    ahead: Ahead
    errand: Errand
    wants: list[Want]
    own: dict[str, tuple[Tensor, Guess | None]]
    """By table: the slots that this worker wants itself, and what is known of the lookup."""


class Foresight:
    """What a session knows of its batches and lookups."""

    def __init__(
        self,
        peers: Peers,
        neighbours: Neighbours,
        tables: Mapping[str, TableRows],
        *,
        is_on: bool,
        is_early: bool,
    ) -> None:
        """`is_early`: rows that the running step leaves alone come during it, by a thread."""
        self._peers = peers
        self._neighbours = neighbours
        self._tables = tables
        self._is_on = is_on and peers.num_workers > 1
        self._is_early = is_early
        self._home = threading.get_ident()
        self._agreed: dict[int, Recipes] = {}
        """By loader: the tables that are foreseen; the same tables on all workers."""
        self._before: dict[int, Recipes] = {}
        """By loader: what was found in the batch before."""
        self._drawing: set[int] = set()
        """Loaders that draw random numbers as they are read."""
        self._num_surprises: dict[str, int] = {}
        self._loader: int | None = None
        self._leaves: list[Tensor] = []
        self._found: dict[str, list[Recipe | None]] = {}
        self._is_learned = False
        """The batch has been looked at in a reduction."""
        self._courier = Courier("parallax-ahead")
        self._coming: _Coming | None = None
        self._coming_of: Pass | None = None
        self._number = 0

    # From the loader ----------------------------------------------------------------------

    def is_followed(self) -> bool:
        """Whether a loader is read here by the thread that trains, not by one of the script's."""
        return self._is_on and threading.get_ident() == self._home

    def reads_ahead(self, loader: int) -> bool:
        """Whether the batch after the next one is of use; the same on all workers."""
        return self.is_followed() and bool(self._agreed.get(loader))

    def draws(self, loader: int) -> None:
        """Reading this loader draws random numbers here."""
        self._drawing.add(loader)

    @torch.inference_mode(False)
    def hand_out(self, of: Pass, batch: Any, following: tuple[Any, ...]) -> None:
        """The script gets a batch; `following` is the one after it, if it has been read."""
        loader, _ = of
        if not self.is_followed():
            return
        self._loader, self._is_learned = loader, False
        self._leaves, self._found = leaves_of(batch), {}
        agreed = self._agreed.get(loader, {})
        coming = self._awaited(of)
        if coming is None and agreed:
            coming = self._asked(agreed, batch)
        if coming is not None:
            coming.ahead.send_late()
        if agreed and following:  # Beside the rows, which are waited for.
            self._coming, self._coming_of = self._asked(agreed, following[0]), of
        if coming is not None:
            self._take(coming)
        if self._coming is not None and self._is_early:
            self._coming.ahead.send_early(self._courier)

    def end(self, loader: int) -> None:
        """The loader has ended."""
        if self.is_followed():
            self._loader, self._leaves = None, []
            self._close_window()

    def close(self) -> None:
        self._courier.close()

    def _awaited(self, of: Pass) -> _Coming | None:
        """What is on its way, if it is for this pass; else it is let arrive and dropped."""
        coming, self._coming = self._coming, None
        if coming is not None and self._coming_of != of:
            coming.ahead.send_late()
            coming.ahead.arrived()
            return None
        return coming

    def _take(self, coming: _Coming) -> None:
        found = {demand.stock.name: (demand, rows) for demand, rows in coming.ahead.arrived()}
        if not found:
            return
        with self._peers.waiting(coming.operation):
            rows = [
                found[want.stock.name][1] if want.stock.name in found else want.no_rows()
                for want in coming.wants
            ]
            delivered = coming.errand.delivered(rows)
        for (name, (slots, guess)), mine in zip(coming.own.items(), delivered, strict=True):
            if name in found:
                self._peers.ledger.add(name, rows=len(slots))
                if self._tables[name].shard is not None:
                    self._tables[name].foresee(slots, mine, found[name][0].places, guess)

    def _close_window(self) -> None:
        for table in self._tables.values():
            table.close_window()

    # From lookups -------------------------------------------------------------------------

    def looked_up(self, table: TableRows, ids: Any) -> None:
        """A lookup that was not foreseen: see where its ids come from."""
        known = self._loader is not None and isinstance(ids, Tensor)
        if known and not self._is_learned and not self._is_given_up(table.name):
            self._found.setdefault(table.name, []).append(find_recipe(ids, self._leaves))

    # From the reduction -------------------------------------------------------------------

    def blind(self) -> list[bool]:
        """For each table: whether this worker cannot foresee it."""
        surprised = [name for name, table in self._tables.items() if table.was_surprised()]
        for name in surprised:
            self._num_surprises[name] = self._num_surprises.get(name, 0) + 1
        return [name in surprised or not self._sees(name) for name in self._tables]

    def settle(self, blind: list[bool]) -> None:
        """`blind` is what any worker said: the same on all. See [Note: window]."""
        self._close_window()
        if self._loader is None:
            return
        agreed = self._agreed.setdefault(self._loader, {})
        now = self._recipes()
        for name, is_blind in zip(self._tables, blind, strict=True):
            if is_blind:
                # Rows may have been asked for that their owners have not noted.
                if agreed.pop(name, None) is not None:
                    self._tables[name].surprise()
            elif name in now and name not in agreed:
                agreed[name] = now[name]
        if not self._is_learned:
            self._before[self._loader], self._is_learned = now, True

    def _sees(self, name: str) -> bool:
        loader = self._loader
        if loader is None or loader in self._drawing or self._is_given_up(name):
            return False
        if not self._is_on or self._tables[name].shard is None:
            return False
        if name in self._agreed.get(loader, {}):
            return True
        now = self._recipes().get(name)
        return now is not None and now == self._before.get(loader, {}).get(name)

    def _is_given_up(self, name: str) -> bool:
        return self._num_surprises.get(name, 0) > _MAX_SURPRISES

    def _recipes(self) -> Recipes:
        """Of the tables all of whose lookups were found in the batch."""
        return {
            name: tuple(recipe for recipe in found if recipe is not None)
            for name, found in self._found.items()
            if None not in found
        }

    # Inside -------------------------------------------------------------------------------

    def _asked(self, agreed: Recipes, batch: Any) -> _Coming:
        leaves = leaves_of(batch)
        found = {name: self._ids(name, recipes, leaves) for name, recipes in agreed.items()}
        known = {name: ids for name, ids in found.items() if ids is not None}
        requests = self._requests(known)
        own: dict[str, tuple[Tensor, Guess | None]] = {}
        for name, recipes in agreed.items():
            request = requests.get(name)
            if request is None or request.is_faulty:
                device = self._tables[name].parameter.device
                own[name] = (torch.empty(0, dtype=torch.int64, device=device), None)
                known.pop(name, None)
            else:
                guess = Guess(known[name], request) if len(recipes) == 1 else None
                own[name] = (request.slots, guess)
        self._number += 1
        tables = [self._tables[name] for name in own]
        operation = Operation(Verb.AHEAD, AHEAD, self._number, self._peers.step)
        errand = self._neighbours.ask(
            operation, [table.row_map for table in tables], [slots for slots, _ in own.values()]
        )
        wants = [
            Want(table, slots, slots if table.shard is None else table.shard, table.name in known)
            for table, slots in zip(tables, errand.slots, strict=True)
        ]
        return _Coming(operation, Ahead(self._peers, wants, self._number), errand, wants, own)

    def _ids(self, name: str, recipes: tuple[Recipe, ...], leaves: list[Tensor]) -> Tensor | None:
        """Of all lookups of a table in a batch; None if they cannot be told."""
        shard = self._tables[name].shard
        parts = [recipe.ids(leaves) for recipe in recipes]
        known = [part.reshape(-1) for part in parts if part is not None]
        if len(known) < len(parts) or shard is None:
            return None
        return torch.cat(known).to(shard.device)  # A copy: a script may change its batch in place.

    def _requests(self, ids: Mapping[str, Tensor]) -> dict[str, Request]:
        maps = [self._tables[name].row_map for name in ids]
        together = Request.of_all(list(ids.values()), maps) if ids else []
        if together is not None:
            return dict(zip(ids, together, strict=True))
        return {
            name: Request.of(each, row_map, wraps=False, device=each.device)
            for (name, each), row_map in zip(ids.items(), maps, strict=True)
        }
