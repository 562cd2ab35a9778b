"""Bytes and seconds for each parameter and step, as they were on this worker."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(slots=True)
class Entry:
    """What one parameter cost this worker."""

    sent_bytes: float = 0
    received_bytes: float = 0
    seconds: float = 0.0
    """Time that this worker stood waiting in its exchanges. What ran beside the backward is not in
    it; an exchange of several parameters is shared out by their bytes."""
    rows: float = 0
    """Rows of a table that this worker touched."""
    asked_rows: float = 0
    """Rows that it asked their owners for: the same, or what it asked for all of its host."""
    early_rows: float = 0
    """Those of them that came beside the step before."""
    pushed_rows: float = 0
    """Rows whose gradients it sent to their owners, of all backwards."""
    updated_rows: float = 0
    """Rows that this worker updated as their owner, whoever touched them."""
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
        """As `asdict` has it, which copies each value by itself."""
        return {name: getattr(self, name) for name in _ENTRIES}


_ENTRIES = tuple(each.name for each in fields(Entry))

COUNTERS = ("header_seconds", "header_bytes", "local_seconds", "local_bytes")
"""Of a record: what belongs to no parameter."""
AMOUNTS = ("seconds", "samples", "reductions", "backward_seconds", *COUNTERS)
"""Of a record: its numbers."""


@dataclass
class Record:
    """A step: from the end of the one before it to the end of `optimizer.step()`."""

    step: int
    seconds: float = 0.0
    header_seconds: float = 0.0
    """Waited for small messages that belong to no parameter."""
    header_bytes: float = 0.0
    local_seconds: float = 0.0
    """Waited for rows of workers of the same host, to ask and push together."""
    local_bytes: float = 0.0
    """Rows and ids sent to them."""
    samples: float = 0.0
    """That `session.shard` gave this worker."""
    reductions: float = 0.0
    """Backwards whose gradients were brought together: more than one where a script accumulates
    without `no_sync`."""
    backward_seconds: float = 0.0
    """Of those, from the first gradient to the last; 0 where a GPU computes, whose clock is not the
    script's."""
    is_interrupted: bool = False
    """An evaluation took place in it, so its seconds are not those of a step."""
    parameters: dict[str, Entry] = field(default_factory=dict)

    @property
    def waiting_seconds(self) -> float:
        """Time that this worker stood waiting for others."""
        exchanges = sum(entry.seconds for entry in self.parameters.values())
        return self.header_seconds + self.local_seconds + exchanges

    @property
    def sent_bytes(self) -> float:
        return sum(entry.sent_bytes for entry in self.parameters.values())

    def as_dict(self) -> dict[str, Any]:
        """As `asdict` has it."""
        parameters = {name: entry.as_dict() for name, entry in self.parameters.items()}
        return {**vars(self), "parameters": parameters}


class Ledger:
    """The newest steps one by one in `steps`, and `totals` over all of them. What lookups under
    `no_grad` moved, as evaluations make them, belongs to no step: it is in `evaluation`.

    `header_bytes` and `header_seconds` count the small messages that precede exchanges and belong
    to no parameter; a worker that is ahead of the others waits for them there. `local_bytes` and
    `local_seconds` count rows that go between workers of one host. See [Note: neighbours].
    """

    def __init__(self, max_steps: int = 1000) -> None:
        self.steps: deque[Record] = deque(maxlen=max_steps)
        self.totals: dict[str, Entry] = {}
        self.evaluation: dict[str, Entry] = {}
        self.num_steps = 0
        self.header_bytes = 0
        self.header_seconds = 0.0
        self.local_bytes = 0
        self.local_seconds = 0.0
        self._closed = dict.fromkeys(COUNTERS, 0.0)
        self._open = Record(step=0)
        self._opened = time.perf_counter()

    def begin(self) -> None:
        """The first step begins: what was exchanged to set up belongs to none."""
        self._open, self._opened = Record(step=0), time.perf_counter()
        self._closed = {name: float(getattr(self, name)) for name in COUNTERS}

    def add(self, parameter: str, **amounts: float) -> None:
        """Write amounts (fields of `Entry`) to a parameter in the step that is under way."""
        entry = self._open.parameters.get(parameter)
        if entry is None:
            self._open.parameters[parameter] = Entry(**amounts)
            return
        for name, amount in amounts.items():
            setattr(entry, name, getattr(entry, name) + amount)

    def add_shared(self, sent_bytes: Mapping[str, float], seconds: float) -> None:
        """Write an exchange of several parameters: as many bytes came of each, and the time that
        it was waited for is shared out by them."""
        entries, seconds = self._open.parameters, seconds / max(sum(sent_bytes.values()), 1)
        for name, size in sent_bytes.items():
            entry = entries.get(name)
            if entry is None:
                entries[name] = Entry(size, size, size * seconds)
            else:
                entry.sent_bytes += size
                entry.received_bytes += size
                entry.seconds += size * seconds

    def add_samples(self, number: float) -> None:
        self._open.samples += number

    def add_reduction(self, backward_seconds: float) -> None:
        self._open.reductions += 1
        self._open.backward_seconds += backward_seconds

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is exchanged in the block belongs to no step."""
        start, step = time.perf_counter(), self._open
        before = {name: float(getattr(self, name)) for name in COUNTERS}
        self._open = Record(step.step)
        try:
            yield
        finally:
            _add_all(self._open.parameters, self.evaluation)
            self._open, step.is_interrupted = step, True
            self._opened += time.perf_counter() - start
            for name in COUNTERS:
                self._closed[name] += getattr(self, name) - before[name]

    @contextmanager
    def timed(self, parameter: str) -> Iterator[None]:
        """Write the time of the block to a parameter."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(parameter, seconds=time.perf_counter() - start)

    def close_step(self) -> None:
        """End the step that is under way."""
        now = time.perf_counter()
        self._open.seconds = now - self._opened
        for name in COUNTERS:
            so_far = float(getattr(self, name))
            setattr(self._open, name, so_far - self._closed[name])
            self._closed[name] = so_far
        _add_all(self._open.parameters, self.totals)
        self.steps.append(self._open)
        self.num_steps += 1
        self._open = Record(step=self.num_steps)
        self._opened = now

    def mean(self, num_steps: int) -> Record | None:
        """The newest steps' mean, under the number of the last; None before the first.

        Those in which an evaluation took place are left out, if there are others.
        """
        newest = list(self.steps)[-num_steps:]
        newest = [record for record in newest if not record.is_interrupted] or newest
        if not newest:
            return None
        sums: dict[str, Entry] = {}
        for record in newest:
            _add_all(record.parameters, sums)
        means = {
            name: sum(getattr(record, name) for record in newest) / len(newest) for name in AMOUNTS
        }
        parameters = {name: entry.divided(len(newest)) for name, entry in sums.items()}
        return Record(newest[-1].step, **means, parameters=parameters)

    def mean_bytes(self) -> dict[str, float]:
        """Sent and received bytes a step, by parameter, over all steps."""
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
