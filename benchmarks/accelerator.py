"""An emulated accelerator: the dense compute of a model is a sleep, all else is real.

Several workers that share a few cores spend nearly all their time computing, which hides what an
exchange costs. Here lookups, gradients of every parameter, their exchange and the optimizer's
updates happen as always; only the arithmetic between them, which an accelerator would do beside
the processor, takes `seconds` of sleep instead. Figures made this way must say so.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from lm1b import LanguageModel


class AcceleratedLanguageModel(LanguageModel):
    """The language model with its compute on an emulated accelerator."""

    seconds = 0.02

    def forward(self, windows: Tensor) -> Tensor:
        softmax = self.softmax
        candidates = softmax.proposal.draw(windows.device)
        words = torch.cat([windows[:, 1:].flatten(), candidates])
        rows = [self.embedding(windows[:, :-1]), softmax.table(words), softmax.bias(words)]
        dense = [*self.lstm.parameters(), *self.projection.parameters()]
        loss: Tensor = _Compute.apply(self.seconds, *rows, *dense)
        return loss


class _Compute(torch.autograd.Function):
    """A third of the time forward, two thirds backward; gradients are small constants."""

    @staticmethod
    def forward(ctx: Any, seconds: float, *inputs: Tensor) -> Tensor:
        ctx.seconds = seconds
        ctx.shapes = [tensor.shape for tensor in inputs]
        time.sleep(seconds / 3)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds / 3)
        return None, *(torch.full(shape, 1e-4) for shape in ctx.shapes)
