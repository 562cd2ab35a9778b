"""Prefetch: which tensors of a batch reach which table, and the rows of the next batch.

A table is prefetched for a loader when on every worker the ids of its lookups were the same parts
of two batches in a row, or when `shard(…, ids=…)` names them; workers tell each other in the
reduction at the end of a backward. From then on the rows of all such tables come together, and one
batch ahead, until some worker finds a lookup with other ids. See [Note: early
and late] in comm/pull.py and [Note: out-of-band pull] in comm/out_of_band.py.

[Note: window] Lookups need no message from the moment a batch is handed out until its gradients are
reduced, or the loader ends. In this window no row changes, so a worker that looks up other ids can
be served by the others at any time. An update in the window, with gradients of an earlier backward,
begins with a meeting of all workers and ends the window for its tables.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallax.comm.header import Operation, Verb
from parallax.comm.host_merge import HostMerge, Union
from parallax.comm.peers import Peers
from parallax.comm.pull import Mask, Pull, Pulled
from parallax.comm.threads import BackgroundThread
from parallax.data.recipe import Columns, Recipe, Source, find_recipe, leaves_of
from parallax.engine.batch import Batch, ExpectedLookup, expected_lookups
from parallax.engine.table_set import TableSet
from parallax.errors import ConfigError
from parallax.tables.host import Counts
from parallax.tables.space import Request, SlotSpace

_MAX_UNEXPECTED = 2
_MAX_ASKED = 64
Recipes = dict[str, tuple[Source, ...]]
Pass = tuple[int, int]
"""A loader's number, and that of the pass over it."""

PREFETCH = "the prefetch"
"""What it is called in messages."""


@dataclass(frozen=True)
class _Coming:
    """Rows of a batch on their way."""

    of: Pass
    operation: Operation
    pull: Pull
    union: Union
    space: SlotSpace
    request: Request
    lookups: list[ExpectedLookup]
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
        self._is_large = True
        """Whether the last batch was worth early rows; the same on all workers."""
        self._home = threading.get_ident()
        self._agreed: dict[int, Recipes] = {}
        """By loader: the tables that are prefetched; the same tables on all workers."""
        self._before: dict[int, Recipes] = {}
        """By loader: what was found in the batch before."""
        self._declared: dict[int, Recipes] = {}
        """By loader: the ids that the script names."""
        self._drawing: set[int] = set()
        """Loaders that draw random numbers as they are read."""
        self._num_unexpected: dict[str, int] = {}
        self._window = _Window()
        self._thread = BackgroundThread("parallax-prefetch")
        self._coming: _Coming | None = None
        self._number = 0
        self._marks = _Marks(tables.space, tables.changing)

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
        self,
        of: Pass,
        batch: Any,
        following: tuple[Any, ...],
        not_prefetched: set[str],
        num_parts: int,
    ) -> Batch | None:
        """The script gets a batch; `following` is the one after it, if it has been read. Return
        the batch's rows. Lookups of the tables in `not_prefetched` had no prefetch since their last
        update. Pushes go in `num_parts` parts."""
        loader, _ = of
        if not self.is_followed():
            return None
        self._window = _Window(loader, leaves_of(batch))
        agreed = self._agreed.get(loader, {})
        coming = self._awaited(of)
        if coming is None and agreed:
            coming = self._ask(of, agreed, batch, num_parts)
        if coming is not None:
            coming.pull.send_late(self._marks.may_have_changed_mask)
        if agreed and following:  # Overlaps with the rows, which are waited for.
            self._coming = self._ask(of, agreed, following[0], num_parts)
        found = None if coming is None else self._take(coming, not_prefetched)
        if self._coming is not None and self._is_early and self._is_large:
            self._coming.pull.send_early(self._thread, self._marks)
        return found

    def end(self) -> None:
        """The loader has ended."""
        if self.is_followed():
            self._window = _Window()

    def close(self) -> None:
        self._thread.close()

    def _awaited(self, of: Pass) -> _Coming | None:
        """Return what is on its way, if it is for this pass and these tables; else drop it."""
        coming, self._coming = self._coming, None
        if coming is not None and (coming.of != of or coming.space is not self._tables.space):
            coming.pull.send_late(np.zeros(coming.space.num_tables, np.bool_))
            coming.pull.wait()
            return None
        return coming

    def _take(self, coming: _Coming, not_prefetched: set[str]) -> Batch:
        pulled, pull = coming.pull.wait(), coming.pull
        asked, is_merged = pulled.asked, coming.union.is_merged
        self._is_large = pull.is_large()
        if is_merged:
            with self._peers.waiting(coming.operation):
                rows = coming.union.deliver(pulled.by_key())
            pulled = Pulled(rows, [None] * len(rows), asked)
        positions = coming.space.positions
        known = {name for name in coming.tables if asked.known[positions[name]]}
        self._peers.ledger.add_rows(coming.space.names, rows=coming.request.counts.sum(1))
        self._marks.note(asked.indices, known, not_prefetched)
        return Batch(
            coming.space,
            coming.request,
            pulled,
            coming.lookups,
            known,
            indices=None if is_merged else pull.indices,
            orders=[None] * len(pulled.rows) if is_merged else pull.orders,
        )

    # From lookups -------------------------------------------------------------------------

    def looked_up(self, name: str, ids: Any) -> None:
        """A lookup was not prefetched: see where its ids come from."""
        window = self._window
        known = window.loader is not None and isinstance(ids, Tensor)
        if known and not window.is_learned and not self._is_given_up(name):
            window.found.setdefault(name, []).append(find_recipe(ids, window.leaves))

    # From the reduction -------------------------------------------------------------------

    def cannot_prefetch(self, unexpected: set[str]) -> list[bool]:
        """Say for each table whether this worker cannot prefetch its lookups."""
        for name in unexpected:
            self._num_unexpected[name] = self._num_unexpected.get(name, 0) + 1
        loader = self._window.loader
        if not self._is_on or loader is None or loader in self._drawing:
            return [True] * len(self._tables.by_name)
        agreed = self._agreed.get(loader, {})
        return [
            name in unexpected or (name not in agreed and not self._sees(name))
            for name in self._tables.by_name
        ]

    def settle(self, cannot_prefetch: list[bool]) -> list[str]:
        """Take what any worker said: the same on all. Return the tables that are not prefetched
        any more. See [Note: window]."""
        window = self._window
        loader = window.loader
        if loader is None:
            return []
        agreed = self._agreed.setdefault(loader, {})
        now = window.recipes()
        unexpected = []
        for name, cannot in zip(self._tables.by_name, cannot_prefetch, strict=True):
            if cannot:
                # Rows may have been asked for that their owners have not noted.
                if agreed.pop(name, None) is not None:
                    unexpected.append(name)
            elif name not in agreed:
                recipes = self._declared.get(loader, {}).get(name, now.get(name))
                if recipes is not None:
                    agreed[name] = recipes
        if not window.is_learned:
            self._before[loader], window.is_learned = now, True
        return unexpected

    def _sees(self, name: str) -> bool:
        loader = self._window.loader
        if loader is None or self._is_given_up(name) or name not in self._tables.positions:
            return False
        if name in self._declared.get(loader, {}):
            return True
        now = self._window.recipes().get(name)
        return now is not None and now == self._before.get(loader, {}).get(name)

    def _is_given_up(self, name: str) -> bool:
        return self._num_unexpected.get(name, 0) > _MAX_UNEXPECTED

    # What may change ----------------------------------------------------------------------

    def mark_changed(self, names: set[str]) -> None:
        """Rows of some tables may have changed that no prefetch has asked for."""
        self._marks.mark_changed(names)

    def always_changes(self, names: set[str]) -> None:
        """From now on a step changes every row of these tables."""
        self._marks.always_changes(names)

    def updated(self) -> None:
        """The rows that were asked for have their new values."""
        self._marks.clear()

    def tables_changed(self) -> None:
        """Tables have come or gone, on all workers."""
        self._marks = _Marks(self._tables.space, self._tables.changing)
        for agreed in self._agreed.values():
            for name in set(agreed) - set(self._tables.positions):
                del agreed[name]

    # Inside -------------------------------------------------------------------------------

    def _ask(self, of: Pass, agreed: Recipes, batch: Any, num_parts: int) -> _Coming:
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
        operation = Operation(Verb.PREFETCH, PREFETCH, self._number, self._peers.step)
        union = self._host_merge.union(operation, space, request)
        pull = Pull(
            self._peers,
            space,
            self._tables.storages,
            union.wanted,
            is_known,
            self._number,
            num_parts,
        )
        return _Coming(of, operation, pull, union, space, request, lookups, list(agreed))

    def _lookups(self, agreed: Recipes, batch: Any) -> tuple[list[ExpectedLookup], set[str]]:
        """Return the lookups that a batch will have, and the tables of which all are known."""
        leaves, device = leaves_of(batch), self._tables.space.device
        sources: list[tuple[str, Tensor]] = []
        known = set(agreed)
        columns: Columns = {}
        for name in self._tables.space.names:  # In the order of keys.
            for source in agreed.get(name, ()):
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
        return expected_lookups(sources, device), known


def _request(space: SlotSpace, positions: dict[str, int], lookups: list[ExpectedLookup]) -> Request:
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

    def __init__(self, space: SlotSpace, changing: set[str]) -> None:
        """At first any row may change; every row of the tables in `changing` does in every step."""
        self._space = space
        self._changing = changing
        self._asked = torch.zeros(space.num_rows_here, dtype=torch.bool, device=space.device)
        """By index: workers have the row for the running step."""
        self._noted: list[Tensor] = []
        """What is to be unmarked."""
        self._may_have_changed = set(space.names)

    @property
    def may_have_changed_mask(self) -> Mask:
        return np.array([name in self._may_have_changed for name in self._space.names], np.bool_)

    def may_change(self, indices: Tensor, counts: Counts) -> Mask:
        """Say which rows may change; `counts` is by worker and table. On CPUs only."""
        asked: Mask = self._asked.numpy()[indices.numpy()]
        if self._may_have_changed:
            asked |= np.repeat(np.tile(self.may_have_changed_mask, len(counts)), counts.ravel())
        return asked

    def note(self, asked: Tensor, names: set[str], not_prefetched: set[str]) -> None:
        kept = self._may_have_changed - names
        self._may_have_changed = kept | (not_prefetched & names) | self._changing
        self._asked[asked] = True
        self._noted.append(asked)
        if len(self._noted) > _MAX_ASKED:  # Some optimizer never steps.
            self._noted = [torch.cat(self._noted).unique()]

    def mark_changed(self, names: set[str]) -> None:
        self._may_have_changed |= names & set(self._space.names)

    def always_changes(self, names: set[str]) -> None:
        self._changing = self._changing | names
        self.mark_changed(names)

    def clear(self) -> None:
        for asked in self._noted:
            self._asked[asked] = False
        self._noted.clear()
