"""How an epoch is cut into steps, and a step into the workers' parts; pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Step:
    """One step: the samples of all workers, which follow each other in the epoch's order."""

    start: int
    "Where in the order of samples the step begins."
    counts: list[int]
    "How many samples each worker has, in rank order."
    consumed: int
    "How much of the epoch is consumed after the step: samples or batches, as the cut counts."

    def part(self, rank: int) -> slice:
        begin = self.start + sum(self.counts[:rank])
        return slice(begin, begin + self.counts[rank])


def spread(total: int, weights: Sequence[int]) -> list[int]:
    """`total` samples over workers in proportion to `weights`, by largest remainder.

    Equal remainders favour the lower ranks. Worker 0 always has a sample: what only one worker can
    do (a log line, a metric) is commonly done there.
    """
    whole = sum(weights)
    counts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: -(total * weights[rank] % whole))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    if counts[0] == 0 and total > 0:
        counts[counts.index(max(counts))] -= 1
        counts[0] = 1
    return counts


@dataclass(frozen=True)
class SampleCut:
    """Cuts an order of samples into global batches of `whole`; consumption counts samples."""

    whole: int
    weights: Sequence[int]
    "The workers' batch sizes, or ones to divide every batch evenly."
    drop_last: bool

    def num_steps(self, num_samples: int) -> int:
        return num_samples // self.whole if self.drop_last else -(-num_samples // self.whole)

    def steps(self, lengths: Sequence[int], consumed: int) -> Iterator[Step]:
        total, full = sum(lengths), spread(self.whole, self.weights)
        while (left := total - consumed) >= self.whole:
            yield Step(consumed, full, consumed + self.whole)
            consumed += self.whole
        if left > 0 and not self.drop_last:
            yield Step(consumed, spread(left, self.weights), total)


@dataclass(frozen=True)
class BatchCut:
    """Hands out ready batches of given lengths, one a worker and step, or divides each evenly."""

    num_workers: int
    split: bool

    def num_steps(self, num_batches: int) -> int:
        return num_batches if self.split else -(-num_batches // self.num_workers)

    def steps(self, lengths: Sequence[int], consumed: int) -> Iterator[Step]:
        starts = list(accumulate(lengths, initial=0))
        stride = 1 if self.split else self.num_workers
        for first in range(consumed, len(lengths), stride):
            group = lengths[first : first + stride]
            yield Step(starts[first], self.counts(group), first + len(group))

    def counts(self, group: Sequence[int]) -> list[int]:
        """The workers' numbers of samples in a step of the batches `group`, given their lengths."""
        if self.split:
            return spread(group[0], [1] * self.num_workers)
        return [*group, *[0] * (self.num_workers - len(group))]
