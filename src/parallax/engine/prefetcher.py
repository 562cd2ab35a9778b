"""Prefetch: which tensors of a batch reach which table, and the rows of the next batch.

A table is prefetched for a loader when on every worker the ids of its lookups were the same parts
of two batches in a row, or when `shard(…, ids=…)` names them; workers tell each other in the
reduction at the end of a backward. From then on the rows of all such tables come together, and one
batch ahead, until some worker finds a lookup with other ids. See [Note: prefetch] in
comm/prefetch.py and [Note: detour] in comm/detour.py.

[Note: window] Lookups need no message from the moment a batch is handed out until its gradients are
reduced, or the loader ends. In this window no row changes, because every update needs a reduction,
and a worker whose ids are not as foreseen can be served by the others at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallax.comm.courier import Courier
from parallax.comm.header import Operation, Verb
from parallax.comm.host_merge import HostMerge, Union
from parallax.comm.peers import Peers
from parallax.comm.prefetch import Mask, Prefetch
from parallax.data.recipe import Columns, Recipe, Source, find_recipe, leaves_of
from parallax.engine.batch import Batch, Foreseen, foreseen
from parallax.engine.table_set import TableSet
from parallax.errors import ConfigError
from parallax.tables.host import Counts
from parallax.tables.space import Request, SlotSpace

_MAX_SURPRISES = 2
_MAX_ASKED = 64
Recipes = dict[str, tuple[Source, ...]]
Pass = tuple[int, int]
"""A loader's number, and that of the pass over it."""

AHEAD = "the rows"
"""What they are called in messages."""


@dataclass(frozen=True)
class _Coming:
    """Rows of a batch on their way."""

    of: Pass
    operation: Operation
    prefetch: Prefetch
    union: Union
    space: SlotSpace
    request: Request
    lookups: list[Foreseen]
    tables: list[str]


class Prefetcher:
    """Knows how batches and lookups belong together, and brings the rows of the next batch."""

    def __init__(
        self,
        peers: Peers,
        host_merge: HostMerge,
        tables: TableSet,
        *,
        is_on: bool,
        is_early: bool,
    ) -> None:
        """`is_early`: rows that the running step leaves alone come during it, by a thread."""
        self._peers = peers
        self._host_merge = host_merge
        self._tables = tables
        self._is_on = is_on and peers.num_workers > 1
        self._is_early = is_early
        self._home = threading.get_ident()
        self._agreed: dict[int, Recipes] = {}
        """By loader: the tables that are prefetched; the same tables on all workers."""
        self._before: dict[int, Recipes] = {}
        """By loader: what was found in the batch before."""
        self._declared: dict[int, Recipes] = {}
        """By loader: the ids that the script names."""
        self._drawing: set[int] = set()
        """Loaders that draw random numbers as they are read."""
        self._num_surprises: dict[str, int] = {}
        self._window = _Window()
        self._courier = Courier("parallax-prefetch")
        self._coming: _Coming | None = None
        self._number = 0
        self._marks = _Marks(tables.space)

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

    def declare(self, loader: int, ids: dict[str, Any]) -> None:
        """The script names the ids of some tables: functions of a batch."""
        unknown = sorted(set(ids) - set(self._tables.by_name))
        if unknown:
            known = ", ".join(map(repr, self._tables.by_name)) or "none"
            raise ConfigError(
                f"shard(ids=…) names {unknown[0]!r}, which is no table that is sharded. Tables: "
                f"{known}"
            )
        found: Recipes = {name: (Source(function=function),) for name, function in ids.items()}
        self._declared[loader] = found
        self._agreed[loader] = {n: r for n, r in found.items() if n in self._tables.positions}

    @torch.inference_mode(False)
    def hand_out(
        self, of: Pass, batch: Any, following: tuple[Any, ...], unforeseen: set[str]
    ) -> Batch | None:
        """The script gets a batch; `following` is the one after it, if it has been read. Return
        the batch's rows. Lookups of the tables in `unforeseen` had no prefetch since their last
        update."""
        loader, _ = of
        if not self.is_followed():
            return None
        self._window = _Window(loader, leaves_of(batch))
        agreed = self._agreed.get(loader, {})
        coming = self._awaited(of)
        if coming is None and agreed:
            coming = self._ask(of, agreed, batch)
        if coming is not None:
            coming.prefetch.send_late(self._marks.spoiled_mask)
        if agreed and following:  # Overlaps with the rows, which are waited for.
            self._coming = self._ask(of, agreed, following[0])
        found = None if coming is None else self._take(coming, unforeseen)
        if self._coming is not None and self._is_early:
            self._coming.prefetch.send_early(self._courier, self._marks.may_change)
        return found

    def end(self) -> None:
        """The loader has ended."""
        if self.is_followed():
            self._window = _Window()

    def close(self) -> None:
        self._courier.close()

    def _awaited(self, of: Pass) -> _Coming | None:
        """Return what is on its way, if it is for this pass and these tables; else drop it."""
        coming, self._coming = self._coming, None
        if coming is not None and (coming.of != of or coming.space is not self._tables.space):
            coming.prefetch.send_late(np.zeros(coming.space.num_tables, np.bool_))
            coming.prefetch.wait()
            return None
        return coming

    def _take(self, coming: _Coming, unforeseen: set[str]) -> Batch:
        arrived = coming.prefetch.wait()
        rows = arrived.rows
        if coming.union.is_merged:
            with self._peers.waiting(coming.operation):
                rows = coming.union.deliver(rows)
        positions = self._tables.positions
        known = {name for name in coming.tables if arrived.known[positions[name]]}
        counts = coming.request.counts.sum(1)
        self._peers.ledger.add_rows(coming.space.names, rows=counts)
        self._marks.note(arrived.asked, known, unforeseen)
        indices = None if coming.union.is_merged else coming.prefetch.indices
        return Batch(coming.space, coming.request, rows, coming.lookups, positions, known, indices)

    # From lookups -------------------------------------------------------------------------

    def looked_up(self, name: str, ids: Any) -> None:
        """A lookup was not foreseen: see where its ids come from."""
        window = self._window
        known = window.loader is not None and isinstance(ids, Tensor)
        if known and not window.is_learned and not self._is_given_up(name):
            window.found.setdefault(name, []).append(find_recipe(ids, window.leaves))

    # From the reduction -------------------------------------------------------------------

    def blind(self, surprised: set[str]) -> list[bool]:
        """For each table: whether this worker cannot foresee its lookups."""
        for name in surprised:
            self._num_surprises[name] = self._num_surprises.get(name, 0) + 1
        loader = self._window.loader
        if not self._is_on or loader is None or loader in self._drawing:
            return [True] * len(self._tables.by_name)
        agreed = self._agreed.get(loader, {})
        return [
            name in surprised or (name not in agreed and not self._sees(name))
            for name in self._tables.by_name
        ]

    def settle(self, blind: list[bool]) -> list[str]:
        """`blind` is what any worker said: the same on all. Return the tables that are not
        prefetched any more. See [Note: window]."""
        window = self._window
        loader = window.loader
        if loader is None:
            return []
        agreed = self._agreed.setdefault(loader, {})
        now = window.recipes()
        surprised = []
        for name, is_blind in zip(self._tables.by_name, blind, strict=True):
            if is_blind:
                # Rows may have been asked for that their owners have not noted.
                if agreed.pop(name, None) is not None:
                    surprised.append(name)
            elif name not in agreed:
                recipes = self._declared.get(loader, {}).get(name, now.get(name))
                if recipes is not None:
                    agreed[name] = recipes
        if not window.is_learned:
            self._before[loader], window.is_learned = now, True
        return surprised

    def _sees(self, name: str) -> bool:
        loader = self._window.loader
        if loader is None or self._is_given_up(name) or name not in self._tables.positions:
            return False
        if name in self._declared.get(loader, {}):
            return True
        now = self._window.recipes().get(name)
        return now is not None and now == self._before.get(loader, {}).get(name)

    def _is_given_up(self, name: str) -> bool:
        return self._num_surprises.get(name, 0) > _MAX_SURPRISES

    # What may change ----------------------------------------------------------------------

    def spoil(self, names: set[str]) -> None:
        """Rows of some tables may have changed that no prefetch has asked for."""
        self._marks.spoil(names)

    def updated(self) -> None:
        """The rows that were asked for have their new values."""
        self._marks.clear()

    def tables_changed(self) -> None:
        """Tables have come or gone, on all workers."""
        self._marks = _Marks(self._tables.space)
        for agreed in self._agreed.values():
            for name in set(agreed) - set(self._tables.positions):
                del agreed[name]

    # Inside -------------------------------------------------------------------------------

    def _ask(self, of: Pass, agreed: Recipes, batch: Any) -> _Coming:
        space, positions = self._tables.space, self._tables.positions
        lookups, known = self._lookups(agreed, batch)
        request = _request(space, positions, lookups)
        if request.is_faulty:
            bad = {each[0] for each in lookups if _request(space, positions, [each]).is_faulty}
            known -= bad
            lookups = [each for each in lookups if each[0] not in bad]
            request = _request(space, positions, lookups)
        is_known = np.ones(space.num_tables, np.bool_)
        for name in set(agreed) - known:
            is_known[positions[name]] = False
        self._number += 1
        operation = Operation(Verb.AHEAD, AHEAD, self._number, self._peers.step)
        union = self._host_merge.union(operation, space, request)
        prefetch = Prefetch(
            self._peers, space, self._tables.storages, union.wanted, is_known, self._number
        )
        return _Coming(of, operation, prefetch, union, space, request, lookups, list(agreed))

    def _lookups(self, agreed: Recipes, batch: Any) -> tuple[list[Foreseen], set[str]]:
        """Return the lookups that a batch will have, and the tables of which all are known."""
        leaves, device = leaves_of(batch), self._tables.space.device
        sources: list[tuple[str, Tensor]] = []
        known = set(agreed)
        columns: Columns = {}
        for name, recipes in agreed.items():
            for source in recipes:
                unbound = columns.get(source.leaf)
                if unbound is not None and source.column is not None:
                    parts: Sequence[Tensor | None] = (unbound[source.column],)
                else:
                    parts = source.parts(batch, leaves, columns)
                for part in parts:
                    if part is None:
                        known.discard(name)
                    else:
                        sources.append((name, part))
        if len(known) < len(agreed):
            sources = [(name, part) for name, part in sources if name in known]
        return foreseen(sources, device), known


def _request(space: SlotSpace, positions: dict[str, int], lookups: list[Foreseen]) -> Request:
    nothing = torch.empty(0, dtype=torch.int64, device=space.device)
    ids = [ids for _, _, _, ids in lookups] or [nothing]
    return space.request([positions[name] for name, _, _, _ in lookups] or [0], ids)


class _Window:
    """What is known of the batch that is handed out."""

    def __init__(self, loader: int | None = None, leaves: list[Tensor] | None = None) -> None:
        self.loader = loader
        self.leaves = leaves or []
        self.found: dict[str, list[Recipe | None]] = {}
        """By table: where the ids of its lookups come from."""
        self.is_learned = False
        """A reduction has looked at it."""

    def recipes(self) -> Recipes:
        """Return the tables all of whose lookups were found in the batch."""
        return {
            name: tuple(Source.of(recipe) for recipe in found if recipe is not None)
            for name, found in self.found.items()
            if None not in found
        }


class _Marks:
    """Which of this owner's rows the running step may change."""

    def __init__(self, space: SlotSpace) -> None:
        """At first any row may change."""
        self._space = space
        self._asked = torch.zeros(space.num_rows_here, dtype=torch.bool, device=space.device)
        """By index: workers have the row for the running step."""
        self._noted: list[Tensor] = []
        """What is to be unmarked."""
        self._spoiled = set(space.names)

    @property
    def spoiled_mask(self) -> Mask:
        return np.array([name in self._spoiled for name in self._space.names], np.bool_)

    def may_change(self, indices: Tensor, counts: Counts) -> Mask:
        """Say which rows may change; `counts` is by worker and table. On CPUs only."""
        asked: Mask = self._asked.numpy()[indices.numpy()]
        if self._spoiled:
            asked |= np.repeat(np.tile(self.spoiled_mask, len(counts)), counts.ravel())
        return asked

    def note(self, asked: Tensor, names: set[str], unforeseen: set[str]) -> None:
        self._spoiled = (self._spoiled - names) | (unforeseen & names)
        self._asked[asked] = True
        self._noted.append(asked)
        if len(self._noted) > _MAX_ASKED:  # Some optimizer never steps.
            self._noted = [torch.cat(self._noted).unique()]

    def spoil(self, names: set[str]) -> None:
        self._spoiled |= names & set(self._space.names)

    def clear(self) -> None:
        for asked in self._noted:
            self._asked[asked] = False
        self._noted.clear()
