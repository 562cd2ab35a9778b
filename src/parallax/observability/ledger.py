"""The ledger: bytes and seconds of each parameter and step, measured on this worker."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Entry:
    """What one parameter cost this worker."""

    sent_bytes: float = 0
    received_bytes: float = 0
    seconds: float = 0.0
    """Time that this worker waited in exchanges. It does not include exchanges that overlapped with
    backward. The time of an exchange of several parameters is divided by their bytes."""
    rows: float = 0
    """Rows of a table that this worker touched."""
    asked_rows: float = 0
    """Rows that it requested from their owners: the same, or those of all workers of its host."""
    early_rows: float = 0
    """Those of them that were received during the step before."""
    pushed_rows: float = 0
    """Rows whose gradients it sent to their owners, in all backwards."""
    updated_rows: float = 0
    """Rows that this worker updated as their owner, for all workers."""
    nonfinite_rows: float = 0
    """Row gradients with a NaN or an infinity that this worker received as the rows' owner."""

    def add(self, other: Entry) -> None:
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.seconds += other.seconds
        self.rows += other.rows
        self.asked_rows += other.asked_rows
        self.early_rows += other.early_rows
        self.pushed_rows += other.pushed_rows
        self.updated_rows += other.updated_rows
        self.nonfinite_rows += other.nonfinite_rows

    def divided(self, number: int) -> Entry:
        return Entry(*(getattr(self, name) / number for name in _ENTRIES))

    def as_dict(self) -> dict[str, float]:
        """Return the same as `asdict`, which is slower because it copies each value."""
        return {name: getattr(self, name) for name in _ENTRIES}


_ENTRIES = tuple(each.name for each in fields(Entry))
_NUMBERS = {name: number for number, name in enumerate(_ENTRIES)}

Blocks = dict[tuple[str, ...], NDArray[np.float64]]
"""Amounts of several parameters: (names) → an array by field of `Entry` and parameter."""


def _fold(blocks: Blocks, entries: dict[str, Entry]) -> None:
    """Add blocks to entries, and clear them."""
    for names, block in blocks.items():
        for name, amounts in zip(names, block.T.tolist(), strict=True):
            if any(amounts):
                entry = Entry(*amounts)
                if name in entries:
                    entries[name].add(entry)
                else:
                    entries[name] = entry
    blocks.clear()


COUNTERS = ("header_seconds", "header_bytes", "local_seconds", "local_bytes")
"""Fields of a record that belong to no parameter."""
AMOUNTS = ("seconds", "samples", "reductions", "backward_seconds", *COUNTERS)
"""Fields of a record that are numbers."""


@dataclass
class Record:
    """A step: from the end of the one before it to the end of `optimizer.step()`."""

    step: int
    seconds: float = 0.0
    header_seconds: float = 0.0
    """Time waited for small messages that belong to no parameter."""
    header_bytes: float = 0.0
    local_seconds: float = 0.0
    """Time waited for workers of the same host, to merge requests and gradients."""
    local_bytes: float = 0.0
    """Rows and ids sent to them."""
    samples: float = 0.0
    """Samples that `session.shard` gave this worker."""
    reductions: float = 0.0
    """Backwards whose gradients were reduced: more than one if a script accumulates without
    `no_sync`."""
    backward_seconds: float = 0.0
    """Time of these backwards, from the first gradient to the last; 0 on GPUs, which run
    asynchronously."""
    is_interrupted: bool = False
    """Whether an evaluation took place in it: its seconds are not those of a step."""
    parameters: dict[str, Entry] = field(default_factory=dict)
    blocks: Blocks = field(default_factory=dict, repr=False, compare=False)
    """Amounts that are added to `parameters` when it is read."""

    @property
    def waiting_seconds(self) -> float:
        """Time that this worker waited for others."""
        return self.header_seconds + self.local_seconds + self._sum("seconds")

    @property
    def sent_bytes(self) -> float:
        return self._sum("sent_bytes")

    def _sum(self, name: str) -> float:
        blocks = sum(float(block[_NUMBERS[name]].sum()) for block in self.blocks.values())
        return blocks + float(sum(getattr(entry, name) for entry in self.parameters.values()))

    def as_dict(self) -> dict[str, Any]:
        """Return the same as `asdict`, without blocks."""
        parameters = {name: entry.as_dict() for name, entry in self.parameters.items()}
        found = {**vars(self), "parameters": parameters}
        del found["blocks"]
        return found


class Ledger:
    """The newest steps in `steps`, and `totals` over all steps. Lookups under `no_grad`, as in
    evaluations, belong to no step; they are in `evaluation`.

    `header_bytes` and `header_seconds` count the small messages that precede exchanges and belong
    to no parameter. A worker that is faster than the others waits for them there. `local_bytes` and
    `local_seconds` count rows that are sent between workers of one host. See [Note: speakers].
    """

    def __init__(self, max_steps: int = 1000) -> None:
        self.records: deque[Record] = deque(maxlen=max_steps)
        """The newest steps; read `parameters` through `steps`, which fills them."""
        self._totals: dict[str, Entry] = {}
        self._total_blocks: Blocks = {}
        self.evaluation: dict[str, Entry] = {}
        self.num_steps = 0
        self.header_bytes = 0
        self.header_seconds = 0.0
        self.local_bytes = 0
        self.local_seconds = 0.0
        self._closed = dict.fromkeys(COUNTERS, 0.0)
        self._open = Record(step=0)
        self._opened = time.perf_counter()

    @property
    def steps(self) -> deque[Record]:
        """The newest steps, one by one."""
        for record in self.records:
            _fold(record.blocks, record.parameters)
        return self.records

    @property
    def totals(self) -> dict[str, Entry]:
        """Sums over all steps, by parameter."""
        _fold(self._total_blocks, self._totals)
        return self._totals

    def begin(self) -> None:
        """Begin the first step. Exchanges of the set-up belong to no step."""
        self._open, self._opened = Record(step=0), time.perf_counter()
        self._closed = {name: float(getattr(self, name)) for name in COUNTERS}

    def add(self, parameter: str, **amounts: float) -> None:
        """Add amounts (fields of `Entry`) to a parameter in the current step."""
        entry = self._open.parameters.get(parameter)
        if entry is None:
            self._open.parameters[parameter] = Entry(**amounts)
            return
        for name, amount in amounts.items():
            setattr(entry, name, getattr(entry, name) + amount)

    def add_rows(self, names: tuple[str, ...], **amounts: NDArray[np.generic]) -> None:
        """Add amounts of several parameters: for each field an array by parameter."""
        block = self._open.blocks.get(names)
        if block is None:
            block = self._open.blocks[names] = np.zeros((len(_ENTRIES), len(names)))
        for name, values in amounts.items():
            block[_NUMBERS[name]] += values

    def add_shared(
        self, names: tuple[str, ...], sent_bytes: NDArray[np.float64], seconds: float
    ) -> None:
        """Add an exchange of several parameters that received as many bytes as it sent. The time
        waited for it is divided by bytes."""
        share = seconds * sent_bytes / max(float(sent_bytes.sum()), 1.0)
        self.add_rows(names, sent_bytes=sent_bytes, received_bytes=sent_bytes, seconds=share)

    def add_samples(self, number: float) -> None:
        self._open.samples += number

    def add_reduction(self, backward_seconds: float) -> None:
        self._open.reductions += 1
        self._open.backward_seconds += backward_seconds

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count exchanges in the block for `evaluation`, not for the step."""
        start, step = time.perf_counter(), self._open
        before = {name: float(getattr(self, name)) for name in COUNTERS}
        self._open = Record(step.step)
        try:
            yield
        finally:
            _fold(self._open.blocks, self._open.parameters)
            _add_all(self._open.parameters, self.evaluation)
            self._open, step.is_interrupted = step, True
            self._opened += time.perf_counter() - start
            for name in COUNTERS:
                self._closed[name] += getattr(self, name) - before[name]

    @contextmanager
    def timed(self, parameter: str) -> Iterator[None]:
        """Add the time of the block to a parameter."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(parameter, seconds=time.perf_counter() - start)

    def close_step(self) -> None:
        """End the current step."""
        now = time.perf_counter()
        self._open.seconds = now - self._opened
        for name in COUNTERS:
            so_far = float(getattr(self, name))
            setattr(self._open, name, so_far - self._closed[name])
            self._closed[name] = so_far
        _add_all(self._open.parameters, self._totals)
        _add_blocks(self._open.blocks, self._total_blocks)
        self.records.append(self._open)
        self.num_steps += 1
        self._open = Record(step=self.num_steps)
        self._opened = now

    def mean(self, num_steps: int) -> Record | None:
        """Return the mean of the newest steps, with the number of the last; None before the first.

        Steps in which an evaluation took place are left out, if there are others.
        """
        newest = list(self.records)[-num_steps:]
        newest = [record for record in newest if not record.is_interrupted] or newest
        if not newest:
            return None
        sums: dict[str, Entry] = {}
        blocks: Blocks = {}
        for record in newest:
            _add_all(record.parameters, sums)
            _add_blocks(record.blocks, blocks)
        _fold(blocks, sums)
        means = {
            name: sum(getattr(record, name) for record in newest) / len(newest) for name in AMOUNTS
        }
        parameters = {name: entry.divided(len(newest)) for name, entry in sums.items()}
        return Record(newest[-1].step, **means, parameters=parameters)

    def mean_bytes(self) -> dict[str, float]:
        """Return the sent and received bytes per step, by parameter, over all steps."""
        steps = max(self.num_steps, 1)
        return {
            name: (entry.sent_bytes + entry.received_bytes) / steps
            for name, entry in self.totals.items()
        }

    def __repr__(self) -> str:
        sent = sum(entry.sent_bytes for entry in self.totals.values())
        return f"Ledger(num_steps={self.num_steps}, sent_bytes={sent:.0f})"


def _add_all(entries: Mapping[str, Entry], totals: dict[str, Entry]) -> None:
    for name, entry in entries.items():
        total = totals.get(name)
        if total is None:
            totals[name] = replace(entry)
        else:
            total.add(entry)


def _add_blocks(blocks: Blocks, totals: Blocks) -> None:
    for names, block in blocks.items():
        total = totals.get(names)
        totals[names] = block.copy() if total is None else total + block
