"""Inception v3, a dense model of many branches, trained data-parallel.

    parallax run -n 2 examples/inception_v3.py --data images/train --steps 10000 --loaders 2

`python examples/inception_v3.py` trains it on one device, on made-up images. In training a second
classifier looks at the middle of the network; images below 299 pixels are too small for it, and
need `--no-auxiliary`. The figure is the accuracy on a tenth of the images, which is held out.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from images import add_arguments, report_accuracy, split
from loop import steps
from torch import Tensor, nn

import parallax

AUXILIARY_SHARE = 0.4
MIN_SIZE, MIN_AUXILIARY_SIZE = 75, 299  # Pixels; less, and some layer is left with none.
Sizes = tuple[int, int]


class Convolution(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, size: int | Sizes, stride: int = 1, pad=0):
        super().__init__(
            nn.Conv2d(inputs, outputs, size, stride, pad, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Modules side by side; their channels are joined."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Builder:
    """Makes the parts and keeps count of the channels between them."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.channels = 3

    def scale(self, channels: int) -> int:
        return max(int(channels * self.width), 1)

    def chain(self, *layers: tuple, inputs: int | None = None) -> nn.Sequential:
        """Convolutions one after the other: (channels, size, stride, padding) each."""
        inputs, made = inputs or self.channels, []
        for outputs, *options in layers:
            made.append(Convolution(inputs, self.scale(outputs), *options))
            inputs = self.scale(outputs)
        return nn.Sequential(*made)

    def stem(self, *layers: tuple) -> nn.Sequential:
        chain = self.chain(*layers)
        self.channels = self.scale(layers[-1][0])
        return chain

    def pooled(self, channels: int) -> nn.Sequential:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), self.chain((channels, 1)))

    def join(self, *branches: nn.Module, outputs: list[int], kept: bool = False) -> Branches:
        """Branches whose channels are `outputs`, and those that came in if a pooling keeps them."""
        self.channels = sum(map(self.scale, outputs)) + (self.channels if kept else 0)
        return Branches(*branches)

    def grid35(self, pooled: int) -> Branches:
        return self.join(
            self.chain((64, 1)),
            self.chain((48, 1), (64, 5, 1, 2)),
            self.chain((64, 1), (96, 3, 1, 1), (96, 3, 1, 1)),
            self.pooled(pooled),
            outputs=[64, 64, 96, pooled],
        )

    def to_grid17(self) -> Branches:
        branches = [
            self.chain((384, 3, 2)),
            self.chain((64, 1), (96, 3, 1, 1), (96, 3, 2)),
            nn.MaxPool2d(3, 2),
        ]
        return self.join(*branches, outputs=[384, 96], kept=True)

    def grid17(self, c: int) -> Branches:
        wide, high = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
        return self.join(
            self.chain((192, 1)),
            self.chain((c, 1), (c, *wide), (192, *high)),
            self.chain((c, 1), (c, *high), (c, *wide), (c, *high), (192, *wide)),
            self.pooled(192),
            outputs=[192] * 4,
        )

    def to_grid8(self) -> Branches:
        around = [(192, (1, 7), 1, (0, 3)), (192, (7, 1), 1, (3, 0))]
        branches = [
            self.chain((192, 1), (320, 3, 2)),
            self.chain((192, 1), *around, (192, 3, 2)),
            nn.MaxPool2d(3, 2),
        ]
        return self.join(*branches, outputs=[320, 192], kept=True)

    def grid8(self) -> Branches:
        return self.join(
            self.chain((320, 1)),
            nn.Sequential(self.chain((384, 1)), self.cross()),
            nn.Sequential(self.chain((448, 1), (384, 3, 1, 1)), self.cross()),
            self.pooled(192),
            outputs=[320, 384, 384, 384, 384, 192],
        )

    def cross(self) -> Branches:
        inputs = self.scale(384)
        wide, high = (384, (1, 3), 1, (0, 1)), (384, (3, 1), 1, (1, 0))
        return Branches(self.chain(wide, inputs=inputs), self.chain(high, inputs=inputs))


class InceptionV3(nn.Module):
    def __init__(self, num_classes: int = 1000, width: float = 1.0, auxiliary: bool = True) -> None:
        super().__init__()
        make = Builder(width)
        self.middle = nn.Sequential(
            make.stem((32, 3, 2), (32, 3), (64, 3, 1, 1)),
            nn.MaxPool2d(3, 2),
            make.stem((80, 1), (192, 3)),
            nn.MaxPool2d(3, 2),
            *[make.grid35(pooled) for pooled in (32, 64, 64)],
            make.to_grid17(),
            *[make.grid17(channels) for channels in (128, 160, 160, 192)],
        )
        self.auxiliary: nn.Module | None = None
        if auxiliary:
            self.auxiliary = nn.Sequential(
                nn.AvgPool2d(5, 3),
                make.chain((128, 1), (768, 5)),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(make.scale(768), num_classes),
            )
        self.end = nn.Sequential(make.to_grid8(), make.grid8(), make.grid8())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Flatten())
        self.classifier = nn.Linear(make.channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """The score of each class."""
        return self.classifier(self.pool(self.end(self.middle(images))))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        middle = self.middle(images)
        loss = F.cross_entropy(self.classifier(self.pool(self.end(middle))), labels)
        if self.auxiliary is None:
            return loss
        return loss + AUXILIARY_SHARE * F.cross_entropy(self.auxiliary(middle), labels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, image_size=299, lr=0.02)
    parser.add_argument("--no-auxiliary", action="store_true")
    args = parser.parse_args()
    least = MIN_SIZE if args.no_auxiliary else MIN_AUXILIARY_SIZE
    if args.image_size < least:
        parser.error(f"--image-size: at least {MIN_AUXILIARY_SIZE}, or {MIN_SIZE} --no-auxiliary")
    num_classes, loader, held_out = split(args)

    torch.manual_seed(0)
    model = InceptionV3(num_classes, args.width, not args.no_auxiliary)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    session = parallax.parallelize(model, optimizer)

    for images, labels in steps(
        session, session.shard(loader, split=True), args.steps, "inception"
    ):
        model.loss(images, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    if session.rank == 0:  # A model without tables may be used by one worker alone.
        report_accuracy(model, held_out)
    session.close()


if __name__ == "__main__":
    main()
