"""Split an epoch into steps, and a step into the workers' parts. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of all workers in one step, contiguous in the epoch's order."""

    start: int
    "The position of the first sample in the epoch's order."
    counts: list[int]
    "The number of samples of each worker, in rank order."
    consumed: int
    "What is consumed of the epoch after the step, in samples or in batches."

    def part(self, rank: int) -> slice:
        """Return the positions of one worker's samples."""
        begin = self.start + sum(self.counts[:rank])
        return slice(begin, begin + self.counts[rank])


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide `total` samples over workers in proportion to `weights`, by largest remainder.

    Equal remainders favour the lower ranks. Worker 0 always gets a sample, because scripts commonly
    log and compute metrics there.
    """
    sum_weights = sum(weights)
    counts = [total * weight // sum_weights for weight in weights]
    by_remainder = sorted(
        range(len(weights)), key=lambda rank: -(total * weights[rank] % sum_weights)
    )
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    if counts[0] == 0 and total > 0:
        counts[counts.index(max(counts))] -= 1
        counts[0] = 1
    return counts


@dataclass(frozen=True)
class SampleSplitter:
    """Splits an order of samples into global batches of `size`. Consumption counts samples."""

    size: int
    weights: Sequence[int]
    "The workers' batch sizes, or 1 for each to divide every batch evenly."
    drop_last: bool

    def num_steps(self, num_samples: int) -> int:
        return num_samples // self.size if self.drop_last else -(-num_samples // self.size)

    def steps(self, lengths: Sequence[int], consumed: int) -> Iterator[GlobalBatch]:
        total, full = sum(lengths), apportion(self.size, self.weights)
        while (left := total - consumed) >= self.size:
            yield GlobalBatch(consumed, full, consumed + self.size)
            consumed += self.size
        if left > 0 and not self.drop_last:
            yield GlobalBatch(consumed, apportion(left, self.weights), total)


@dataclass(frozen=True)
class BatchSplitter:
    """Gives each worker one ready batch a step, or divides each batch evenly."""

    num_workers: int
    split: bool

    def num_steps(self, num_batches: int) -> int:
        return num_batches if self.split else -(-num_batches // self.num_workers)

    def steps(self, lengths: Sequence[int], consumed: int) -> Iterator[GlobalBatch]:
        starts = list(accumulate(lengths, initial=0))
        stride = 1 if self.split else self.num_workers
        for first in range(consumed, len(lengths), stride):
            group = lengths[first : first + stride]
            yield GlobalBatch(starts[first], self.counts(group), first + len(group))

    def counts(self, group: Sequence[int]) -> list[int]:
        """Return the workers' numbers of samples in a step, from the lengths of its batches."""
        if self.split:
            return apportion(group[0], [1] * self.num_workers)
        return [*group, *[0] * (self.num_workers - len(group))]
