"""The layers of the workloads, in torch: rows of the tables and the rest in, the mean loss out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.residual import ResNet


class SampledWords(nn.Module):
    """An LSTM over words; their followers against the candidates of the batch."""

    def __init__(self, width: int, hidden: int, num_targets: int) -> None:
        super().__init__()
        self.num_targets = num_targets
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.projection = nn.Linear(hidden, width)

    def forward(self, rows: list[Tensor], others: list[Tensor]) -> Tensor:
        embedded, looked_up = rows
        states = self.projection(self.lstm(embedded)[0]).flatten(0, 1)
        targets, candidates = looked_up.split([self.num_targets, len(looked_up) - self.num_targets])
        of_target = (states * targets).sum(1, keepdim=True)
        logits = torch.cat([of_target, states @ candidates.t()], 1)
        loss: Tensor = (logits.logsumexp(1) - of_target.squeeze(1)).mean()
        return loss


class Translation(nn.Module):
    """A Transformer and its output layer."""

    def __init__(self, num_words: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            width, 4, num_layers, num_layers, 4 * width, dropout=0.0, batch_first=True
        )
        self.out = nn.Linear(width, num_words)

    def forward(self, rows: list[Tensor], others: list[Tensor]) -> Tensor:
        logits = self.out(self.transformer(*rows))
        return F.cross_entropy(logits.flatten(0, 1), others[0].flatten())


class Interaction(nn.Module):
    """Products of all pairs of vectors, between two stacks of layers."""

    pairs: Tensor

    def __init__(self, num_dense: int, num_tables: int, width: int, hidden: int = 128) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(num_dense, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        num_vectors = num_tables + 1
        self.register_buffer("pairs", torch.triu_indices(num_vectors, num_vectors, 1), False)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(width + num_pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, rows: list[Tensor], others: list[Tensor]) -> Tensor:
        dense, clicked = others
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *rows], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([bottom, products], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


class Classifier(nn.Module):
    """Images and their classes, no rows."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = ResNet(classes=classes)

    def forward(self, rows: list[Tensor], others: list[Tensor]) -> Tensor:
        loss: Tensor = self.network(*others)
        return loss


class Pooled(nn.Module):
    """The mean of a sample's rows, and two layers behind it."""

    def __init__(self, width: int, hidden: int = 64) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, rows: list[Tensor], others: list[Tensor]) -> Tensor:
        logits = self.network(rows[0].mean(1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, others[0])


class Square(nn.Module):
    """Next to nothing, with a few parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 8)

    def forward(self, rows: list[Tensor], others: list[Tensor]) -> Tensor:
        loss: Tensor = self.linear(rows[0]).square().mean()
        return loss
