"""Which classes stand in for all of them: the candidates of a sampled softmax.

[Note: expected count] T draws with replacement, of which each class is kept once, have class i
among them with the chance q(i) = 1 - (1 - p(i))^T. T is chosen once, such that the q(i) add up to
`num_samples`: the number of candidates differs a little from draw to draw, but q is known exactly.
To go on drawing until `num_samples` are found would fix the number, and make T depend on what was
drawn, so that q would be an estimate. Given a target and the candidates, logits with log q
subtracted say which of them is the target: the loss is lowest where the full softmax's is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallax.errors import ConfigError


class Proposal:
    """Draws distinct classes, and knows how often each is drawn."""

    def __init__(self, probabilities: Tensor, num_samples: int) -> None:
        self.num_classes, self.num_samples = len(probabilities), num_samples
        if not 0 < num_samples <= self.num_classes:
            raise ConfigError(
                f"num_samples={num_samples}: take 1 to {self.num_classes}, the number of classes"
            )
        self.num_draws = _num_draws(probabilities, num_samples)

    def chance(self, ids: Tensor) -> Tensor:
        """The probability of each of these classes in one draw, in float64."""
        raise NotImplementedError

    def inverse(self, uniform: Tensor) -> Tensor:
        """The classes at these points of the cumulative distribution."""
        raise NotImplementedError

    def draw(self, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        """Distinct classes, ascending; see [Note: expected count]."""
        if self.num_draws <= self.num_classes:
            points = _uniform(int(self.num_draws), device, generator)
            distinct: Tensor = self.inverse(points).unique()
            return distinct
        # So many draws that a coin for each class, with the same chance, is cheaper.
        coins = _uniform(self.num_classes, device, generator)
        ids = torch.arange(self.num_classes, device=device)
        kept: Tensor = ids[coins < self.log_expected_count(ids).exp_()]
        return kept

    def log_expected_count(self, ids: Tensor) -> Tensor:
        """Log of how often a draw has each of these classes on average, in float64."""
        return _expected_count(torch.log1p(-self.chance(ids)), self.num_draws).log_()


class LogUniform(Proposal):
    """Classes sorted by falling frequency, as words are by Zipf's law: p(i) ~ log((i+2)/(i+1))."""

    def __init__(self, num_classes: int, num_samples: int) -> None:
        self._log_range = math.log(num_classes + 1)
        super().__init__(self.chance(torch.arange(num_classes, device="cpu")), num_samples)

    def chance(self, ids: Tensor) -> Tensor:
        return torch.log1p(1 / (ids.double() + 1)) / self._log_range

    def inverse(self, uniform: Tensor) -> Tensor:
        ids = (uniform * self._log_range).expm1().long()
        return ids.clamp_(max=self.num_classes - 1)


class Given(Proposal):
    """Classes in proportion to given weights."""

    def __init__(self, weights: Tensor, num_samples: int) -> None:
        _check(weights)
        weights = weights.detach().to("cpu", torch.float64)
        self._chance = weights / weights.sum()
        self._cumulative = self._chance.cumsum(0)
        self._cumulative /= self._cumulative[-1].clone()
        super().__init__(self._chance, num_samples)

    def chance(self, ids: Tensor) -> Tensor:
        # Not buffers of the module: nothing of this is trained, saved or exchanged.
        if self._chance.device != ids.device:
            self._chance = self._chance.to(ids.device)
        return self._chance[ids]

    def inverse(self, uniform: Tensor) -> Tensor:
        if self._cumulative.device != uniform.device:
            self._cumulative = self._cumulative.to(uniform.device)
        return torch.searchsorted(self._cumulative, uniform, right=True)


def make_proposal(
    kind: str | Tensor, num_classes: int, num_samples: int, counts: Tensor | None, power: float
) -> Proposal:
    """What the arguments of `SampledSoftmaxLoss` ask for."""
    if counts is not None and not (isinstance(kind, str) and kind == "unigram"):
        raise ConfigError("counts are given, but only proposal='unigram' uses them")
    if isinstance(kind, Tensor):
        weights = kind
    elif kind == "log_uniform":
        return LogUniform(num_classes, num_samples)
    elif kind == "unigram":
        if counts is None:
            raise ConfigError("proposal='unigram' needs counts=, how often each class occurs")
        weights = counts.double() ** power
    else:
        raise ConfigError(
            f"proposal={kind!r}: take 'log_uniform', 'unigram' or a 1-D tensor of probabilities"
        )
    if weights.shape != (num_classes,):
        raise ConfigError(
            f"the proposal has shape {tuple(weights.shape)}: give one value for each of the "
            f"{num_classes} classes, in one dimension"
        )
    return Given(weights, num_samples)


def _check(weights: Tensor) -> None:
    bad = (~((weights > 0) & weights.isfinite())).nonzero()
    if len(bad):
        place = int(bad[0])
        raise ConfigError(
            f"the proposal has {weights[place].item()} for class {place}: every class needs a "
            "finite value above 0, or its targets cannot be corrected. Counts may be given as "
            "counts.clamp(min=1)"
        )


def _uniform(size: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    return torch.rand(size, dtype=torch.float64, device=device, generator=generator)


def _expected_count(log_miss: Tensor, num_draws: float) -> Tensor:
    return (log_miss * num_draws).expm1_().neg_()


def _num_draws(probabilities: Tensor, num_samples: int) -> float:
    """The fewest draws that find `num_samples` classes on average; infinite for all of them."""
    if num_samples == len(probabilities):
        return math.inf
    log_miss = torch.log1p(-probabilities)
    low, high = float(num_samples - 1), float(num_samples)
    while _expected_count(log_miss, high).sum() < num_samples:
        low, high = high, 2 * high
    while low < (middle := (low + high) // 2) < high:
        if _expected_count(log_miss, middle).sum() < num_samples:
            low = middle
        else:
            high = middle
    return high
