"""A softmax over many classes that touches a few of them in each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import ConfigError
from parallax.nn.proposal import make_proposal

_REDUCTIONS = ("mean", "sum", "none")


class SampledSoftmaxLoss(nn.Module):
    """Cross-entropy of a linear output layer, by the target and a sample of the other classes.

        loss = parallax.nn.SampledSoftmaxLoss(num_words, width, num_samples=8192)
        loss(hidden, targets).backward()     # touches the targets' and the candidates' rows
        loss.full(hidden, targets)           # exact, over all classes, for evaluation

    The layer's weight and bias are tables of its own (`loss.table`, `loss.bias`), which
    `parallax.parallelize` shards by rows. One sample of about `num_samples` distinct candidates
    serves the whole batch; from each logit the log of its class's expected count is subtracted, and
    a target's logit counts once if it is among the candidates. With `num_samples=num_classes` the
    loss is the full softmax's.

    `proposal` says how candidates are drawn: "log_uniform" for classes sorted by falling frequency,
    "unigram" in proportion to `counts ** power`, or a 1-D tensor of probabilities (any positive
    weights). They are drawn by torch's own generator of the hidden states' device, or by the one
    given to `forward`. Workers that have called `torch.manual_seed(seed + session.rank)` draw each
    their own; with generators of the same seed they draw the same.

    Rows whose targets are padding are left out by the caller: `loss(hidden[mask], targets[mask])`.
    """

    def __init__(
        self,
        num_classes: int,
        width: int,
        num_samples: int,
        *,
        proposal: str | Tensor = "log_uniform",
        counts: Tensor | None = None,
        power: float = 1.0,
        bias: bool = True,
        sparse: bool = False,
        reduction: str = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ConfigError(f"reduction={reduction!r}: take one of {', '.join(_REDUCTIONS)}")
        self.num_classes, self.width, self.reduction = num_classes, width, reduction
        self.proposal = make_proposal(proposal, num_classes, num_samples, counts, power)
        options: dict[str, Any] = {"sparse": sparse, "device": device, "dtype": dtype}
        self.table = nn.Embedding(num_classes, width, **options)
        self.bias = nn.Embedding(num_classes, 1, **options) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table.weight, std=1 / math.sqrt(self.width))
        if self.bias is not None:
            nn.init.zeros_(self.bias.weight)

    def forward(
        self, hidden: Tensor, targets: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """The sampled loss of `targets` (...) given the states `hidden` (..., width)."""
        shape = targets.shape
        hidden, targets = self._flat(hidden, targets)
        n = len(targets)
        candidates = self.proposal.draw(hidden.device, generator)
        # One lookup serves targets and candidates: a row that is both travels once.
        ids = torch.cat([targets, candidates])
        weight, shift = self._rows(ids)
        shift = shift - self.proposal.log_expected_count(ids).to(shift.dtype)
        true = (hidden * weight[:n]).sum(1) + shift[:n]
        sampled = torch.addmm(shift[n:], hidden, weight[n:].t())
        rows, columns = _accidental_hits(candidates, targets)
        sampled = sampled.index_put((rows, columns), sampled.new_tensor(-math.inf))
        losses = torch.logaddexp(true, sampled.logsumexp(1)) - true
        return self._reduced(losses, shape)

    @torch.no_grad()
    def full(self, hidden: Tensor, targets: Tensor, chunk_size: int = 8192) -> Tensor:
        """The exact loss over all classes, without a gradient; for the chunks see `log_prob`."""
        return self._reduced(-self.log_prob(hidden, targets, chunk_size), targets.shape)

    @torch.no_grad()
    def log_prob(self, hidden: Tensor, targets: Tensor, chunk_size: int = 8192) -> Tensor:
        """The exact log-probability of each target, without a gradient.

        The classes are looked up `chunk_size` at a time, so that neither the whole table nor the
        logits of all classes are ever held. When sharded, all workers call it together.
        """
        if chunk_size < 1:
            raise ConfigError(f"chunk_size={chunk_size}: take 1 or more")
        shape = targets.shape
        hidden, targets = self._flat(hidden, targets)
        weight, shift = self._rows(targets)
        true = (hidden * weight).sum(1) + shift
        total = torch.full_like(true, -math.inf)
        for start in range(0, self.num_classes, chunk_size):
            stop = min(start + chunk_size, self.num_classes)
            weight, shift = self._rows(torch.arange(start, stop, device=hidden.device))
            logits = torch.addmm(shift, hidden, weight.t())
            total = torch.logaddexp(total, logits.logsumexp(1))
        return (true - total).reshape(shape)

    def perplexity(self, hidden: Tensor, targets: Tensor, chunk_size: int = 8192) -> float:
        """The exact perplexity: e to the mean of the negative log-probabilities."""
        return math.exp(-float(self.log_prob(hidden, targets, chunk_size).mean()))

    def extra_repr(self) -> str:
        of = type(self.proposal).__name__
        return f"num_samples={self.proposal.num_samples}, proposal={of}, {self.reduction}"

    def _rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        weight: Tensor = self.table(ids)
        if self.bias is None:
            return weight, weight.new_zeros(len(ids))
        return weight, self.bias(ids).squeeze(1)

    def _flat(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if hidden.shape != (*targets.shape, self.width):
            raise ConfigError(
                f"hidden has shape {tuple(hidden.shape)} and targets {tuple(targets.shape)}: "
                f"hidden must have the targets' shape and a last dimension of {self.width}"
            )
        if targets.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"targets are {targets.dtype}: take int64 or int32")
        out = (targets < 0) | (targets >= self.num_classes)
        if out.any():
            raise IndexError(
                f"target {targets[out][0].item()} is out of range: classes are 0 to "
                f"{self.num_classes - 1}. Leave padding out: loss(hidden[mask], targets[mask])"
            )
        return hidden.reshape(-1, self.width), targets.reshape(-1).long()

    def _reduced(self, losses: Tensor, shape: torch.Size) -> Tensor:
        if self.reduction == "none":
            return losses.reshape(shape)
        return losses.mean() if self.reduction == "mean" else losses.sum()


def _accidental_hits(candidates: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns at which a candidate is the row's own target; candidates are sorted."""
    places = torch.searchsorted(candidates, targets)
    # The last place is behind all candidates, where a target larger than all of them belongs.
    found = torch.cat([candidates, candidates.new_tensor([-1])])[places] == targets
    rows = found.nonzero().squeeze(1)
    return rows, places[rows]
