"""ResNet-20 for images of 32 × 32: no table at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.workloads.workload import Batch, Workload

if TYPE_CHECKING:
    from torch import nn

IMAGES, CLASSES = 32, 10


class Images(Workload):
    name = "resnet"
    compute_ms = 50.0
    samples = (IMAGES, "images")

    def batch(self, step: int, rank: int) -> Batch:
        random = self.random(step, rank)
        images = random.normal(size=(IMAGES, 3, 32, 32)).astype(np.float32)
        return Batch([], [images, random.integers(CLASSES, size=IMAGES)])

    def layers(self) -> nn.Module:
        from benchmarks.workloads.layers import Classifier

        return Classifier(classes=CLASSES)


def make(variant: str) -> Workload:
    if variant:
        raise ValueError(f"workload 'resnet-{variant}': there is resnet")
    return Images()
