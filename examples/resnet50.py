"""ResNet-50, a model of which every parameter is dense, trained data-parallel.

    parallax run -n 2 examples/resnet50.py --data images/train --steps 10000 --loaders 2

`python examples/resnet50.py` trains it on one device, on made-up images. All parameters are
all-reduced, as DistributedDataParallel does it. The figure is the accuracy on a tenth of the
images, which is held out.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from images import add_arguments, report_accuracy, split
from loop import steps
from torch import Tensor, nn

import parallax

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # Channels and blocks.
EXPANSION = 4


def convolve(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """Three convolutions around a narrow middle, and a shortcut. The middle one has the stride."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = channels * EXPANSION
        self.inner = nn.Sequential(
            convolve(inputs, channels, 1),
            nn.ReLU(inplace=True),
            convolve(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            convolve(channels, outputs, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolve(inputs, outputs, 1, stride)
        nn.init.zeros_(self.inner[-1][1].weight)  # A block begins as its shortcut.

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.shortcut(x))


class ResNet50(nn.Module):
    def __init__(self, num_classes: int = 1000, width: float = 1.0) -> None:
        super().__init__()
        channels = max(int(64 * width), 1)
        stem = [convolve(3, channels, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        blocks: list[nn.Module] = []
        for stage, (full, num_blocks) in enumerate(STAGES):
            inner = max(int(full * width), 1)
            for block in range(num_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, inner, stride))
                channels = inner * EXPANSION
        self.features = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """The score of each class."""
        return self.classifier(self.features(images))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, image_size=224, lr=0.05)
    args = parser.parse_args()
    num_classes, loader, held_out = split(args)

    torch.manual_seed(0)
    model = ResNet50(num_classes, args.width)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    session = parallax.parallelize(model, optimizer)

    # Parallax cuts every batch into a share for each worker.
    for images, labels in steps(session, session.shard(loader, split=True), args.steps, "resnet50"):
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if session.rank == 0:  # A model without tables may be used by one worker alone.
        report_accuracy(model, held_out)
    session.close()


if __name__ == "__main__":
    main()
