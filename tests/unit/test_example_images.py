"""The image examples: their models' sizes, and what they make of a folder."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.examples import load

images, inception_v3, resnet50 = (load(name) for name in ("images", "inception_v3", "resnet50"))


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_models_have_their_well_known_sizes() -> None:
    with torch.device("meta"):
        assert num_parameters(resnet50.ResNet50()) == 25_557_032
        assert num_parameters(inception_v3.InceptionV3()) == 27_161_264
        assert num_parameters(inception_v3.InceptionV3(auxiliary=False)) == 23_834_568


def test_models_see_the_grids_of_the_originals() -> None:
    with torch.device("meta"):
        resnet, inception = resnet50.ResNet50(), inception_v3.InceptionV3()
        batch = torch.empty(2, 3, 299, 299)
        middle = inception.middle(batch)
        assert middle.shape == (2, 768, 17, 17)
        assert inception.end(middle).shape == (2, 2048, 8, 8)
        assert inception.auxiliary[:2](middle).shape == (2, 768, 1, 1)
        assert resnet.features[:-2](torch.empty(2, 3, 224, 224)).shape == (2, 2048, 7, 7)


def test_the_second_classifier_is_trained_along() -> None:
    model = inception_v3.InceptionV3(4, width=0.02)
    model.loss(torch.randn(2, 3, 299, 299), torch.tensor([0, 3])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images in several modes and shapes, red ones and blue ones, and files that are none."""
    for name, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / name / "deeper").mkdir(parents=True)
        Image.new("RGB", (40, 20), color).save(tmp_path / name / "wide.PNG")
        Image.new("RGB", (1, 30), color).save(tmp_path / name / "deeper" / "thin ä.bmp")
        Image.new("RGBA", (8, 8), (*color, 100)).save(tmp_path / name / "clear.png")
        Image.new("RGB", (9, 9), color).quantize(4).save(tmp_path / name / "palette.gif")
        (tmp_path / name / "notes.txt").write_text("no image")
        (tmp_path / name / "a folder.png").mkdir()
    (tmp_path / "labels.csv").write_text("no class")
    return tmp_path


def test_a_folder_is_read(folder: Path) -> None:
    found = images.Folder(folder, 16)
    assert (len(found), found.num_classes) == (8, 2)
    for image, label in (found[i] for i in range(len(found))):
        assert image.shape == (3, 16, 16)
        red, _, blue = (image * torch.tensor(images.STD).view(3, 1, 1)).mean((1, 2))
        assert (red > blue) == (label == 1)


def test_the_middle_is_cut_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        image = Image.new("RGB", (30, 10), (255, 255, 255))
        image.paste((0, 0, 0), (10, 0, 20, 10))
        image.save(tmp_path / name / "x.png")
    pixels, _ = images.Folder(tmp_path, 10)[0]
    black = -torch.tensor(images.MEAN) / torch.tensor(images.STD)
    torch.testing.assert_close(pixels, black.view(3, 1, 1).expand(3, 10, 10))


def test_a_damaged_image_is_named(folder: Path) -> None:
    path = folder / "red" / "clear.png"
    for damaged in (b"", b"\x89PNG\r\n\x1a\n", path.read_bytes()[:45]):
        path.write_bytes(damaged)
        found = images.Folder(folder, 16)
        with pytest.raises(RuntimeError, match=r"red/clear\.png cannot be read as an image"):
            [found[i] for i in range(len(found))]


def test_folders_that_do_not_fit_are_refused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="No folder at"):
        images.Folder(tmp_path / "none", 8)
    for num_classes, part in ((0, "red/deeper"), (1, "one")):
        (tmp_path / "one" / "class").mkdir(parents=True, exist_ok=True)
        with pytest.raises(SystemExit, match=f"has {num_classes} class folders"):
            images.Folder(folder / part, 8)
    shutil.rmtree(tmp_path / "one")
    (folder / "green").mkdir()
    with pytest.raises(SystemExit, match="1 of them without images \\['green'\\]"):
        images.Folder(folder, 8)
    (folder / "green").rmdir()
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(SystemExit, match="pip install pillow"):
        images.Folder(folder, 8)


def test_made_up_images_are_the_same_everywhere_and_held_out_once() -> None:
    args = argparse.Namespace(
        data=None, images=40, classes=4, image_size=8, batch_size=8, loaders=0
    )
    num_classes, loader, held_out = images.split(args)
    assert num_classes == 4
    again = images.split(args)[2]
    assert torch.equal(next(iter(held_out))[0], next(iter(again))[0])
    assert set(loader.dataset.indices).isdisjoint(held_out.dataset.indices)
    assert len(loader.dataset) + len(held_out.dataset) == 40
