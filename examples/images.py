"""Images to classify: made up, or a folder that has a folder of images for each class."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
HELD_OUT = 10  # Of so many images, one is held out.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # Those of ImageNet, as is usual.


class MadeUp(Dataset):
    """Each class has a coarse pattern of its own; an image is that of its class, and noise."""

    def __init__(self, num_images: int, num_classes: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randn(num_classes, 3, 4, 4, generator=generator)
        self._patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")
        self._num_images = num_images
        self.num_classes = num_classes

    def __len__(self) -> int:
        return self._num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % self.num_classes
        generator = torch.Generator().manual_seed(index)
        noise = torch.randn(self._patterns.shape[1:], generator=generator)
        return self._patterns[label] + noise, label


class Folder(Dataset):
    """The images of a folder's class folders, cut to squares from their middle."""

    def __init__(self, folder: Path, size: int) -> None:
        if not folder.is_dir():
            raise SystemExit(f"No folder at {folder}: --data takes one with a folder a class.")
        classes = sorted(child for child in folder.iterdir() if child.is_dir())
        self._images = [
            (path, label)
            for label, child in enumerate(classes)
            for path in sorted(child.rglob("*"))
            if path.suffix.lower() in ENDINGS and path.is_file()
        ]
        empty = [c.name for i, c in enumerate(classes) if i not in {i for _, i in self._images}]
        if len(classes) < 2 or empty:
            raise SystemExit(
                f"{folder} has {len(classes)} class folders, {len(empty)} of them without images "
                f"{empty[:3]}: it needs two or more, each with images ({' '.join(sorted(ENDINGS))})"
            )
        self.num_classes = len(classes)
        self._size = size
        self._pil = _find_pil()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._images[index]
        try:
            with self._pil.open(path) as image:
                # Pixels of the middle square, at once in the size that is wanted.
                side = min(image.size)
                left, top = (image.width - side) // 2, (image.height - side) // 2
                box = (left, top, left + side, top + side)
                image = image.convert("RGB").resize((self._size,) * 2, box=box)
        except Exception as error:  # What a damaged image raises is many things, of no one kind.
            raise RuntimeError(f"{path} cannot be read as an image: {error}") from error
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self._size, self._size, 3).permute(2, 0, 1) / 255
        return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1), label


def _find_pil() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise SystemExit(
            f"Reading images needs Pillow ({error}): `pip install pillow`, or leave --data out to "
            "train on made-up images."
        ) from None


def split(args: argparse.Namespace) -> tuple[int, DataLoader, DataLoader]:
    """The number of classes, and loaders of the images to train on and of the held-out ones."""
    if args.data:
        images = Folder(args.data, args.image_size)
    else:
        images = MadeUp(args.images, args.classes, args.image_size)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    cut = max(len(order) // HELD_OUT, 1)
    options = {"num_workers": args.loaders, "persistent_workers": args.loaders > 0}
    trained, held_out = Subset(images, order[cut:]), Subset(images, order[:cut])
    loader = DataLoader(trained, args.batch_size, shuffle=True, drop_last=True, **options)
    return images.num_classes, loader, DataLoader(held_out, args.batch_size)


@torch.no_grad()
def report_accuracy(model: nn.Module, loader: DataLoader) -> None:
    """Print the share of images whose class has the highest score."""
    model.eval()
    hits = torch.cat([model(images).argmax(1) == labels for images, labels in loader])
    print(f"accuracy {hits.float().mean():.3f} of {len(hits)} held-out images")


def add_arguments(parser: argparse.ArgumentParser, image_size: int, lr: float) -> None:
    add = parser.add_argument
    add("--data", type=Path, help="a folder with a folder of images a class (default: made up)")
    add("--images", type=int, default=10_000, help="made up: images")
    add("--classes", type=int, default=10, help="made up: classes")
    add("--image-size", type=int, default=image_size)
    add("--width", type=float, default=1.0, help="channels, as a multiple of the original's")
    add("--batch-size", type=int, default=32, help="images a step, of all workers together")
    add("--loaders", type=int, default=0, help="processes that read images, for each worker")
    add("--steps", type=int, default=1000)
    add("--lr", type=float, default=lr)
