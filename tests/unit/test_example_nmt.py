"""The translation example: what it makes of text, and what its model may see."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.examples import EXAMPLES, load

nmt, sentences = load("nmt"), load("sentences")


def write(folder: Path, source: bytes, target: bytes) -> tuple[Path, Path]:
    paths = folder / "a source", folder / "a target"
    for path, text in zip(paths, (source, target), strict=True):
        path.write_bytes(text)
    return paths


def test_lines_stay_in_step(tmp_path: Path) -> None:
    """A byte order mark, other line separators, bad bytes, Windows ends, empty and long lines."""
    source = "\ufeffa b\nc\u2028d\x0ce\n\nlong long long\r\nf\n".encode() + b"\xff g\n"
    target = b"A B\nC D E\nX\ny\r\nF\n G \n"
    pairs = sentences.read_pairs(*write(tmp_path, source, target), max_length=3)
    assert pairs[0] == (["a", "b"], ["A", "B"])
    assert pairs[1] == (["c", "d", "e"], ["C", "D", "E"])
    assert pairs[2:4] == [(["long"] * 3, ["y"]), (["f"], ["F"])]
    assert pairs[4] == (["\ufffd", "g"], ["G"])
    assert len(sentences.read_pairs(*write(tmp_path, source, target), max_length=2)) == 3


def test_files_that_are_not_translations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has 2 lines and .* has 1"):
        sentences.read_pairs(*write(tmp_path, b"a\nb\n", b"A\n"), max_length=5)
    with pytest.raises(SystemExit, match="of 2 pairs of lines 0 have 1 to 5 words"):
        sentences.read_pairs(*write(tmp_path, b"a\n\n", b"\nb\n"), max_length=5)
    with pytest.raises(SystemExit, match="of 0 pairs"):
        sentences.read_pairs(*write(tmp_path, b"", b""), max_length=5)
    with pytest.raises(SystemExit, match="Cannot read .*No such file"):
        sentences.read_pairs(tmp_path / "none", tmp_path / "none", max_length=5)
    with pytest.raises(SystemExit, match="Cannot read .*directory"):
        sentences.read_pairs(tmp_path, tmp_path, max_length=5)


def test_vocabulary_goes_there_and_back() -> None:
    words = sentences.Vocabulary([["b", "a", "b", "</s>"], ["a", "b", "c"]], max_words=2)
    assert words.words == [*sentences.SPECIAL, "b", "a"]
    ids = words.encode(["a", "</s>", "b", "c"]).tolist()
    unknown = sentences.UNKNOWN
    assert ids == [sentences.BEGIN, 5, unknown, 4, unknown, sentences.END]
    assert words.decode(ids) == ["a", "<unk>", "b", "<unk>"]
    assert words.decode([sentences.BEGIN, 4, 5]) == ["b", "a"]  # It was cut before its end.


def test_made_up_languages_have_one_translation() -> None:
    pairs = sentences.generate(500, 5)
    translations: dict[str, str] = {}
    for source, target in pairs:
        assert len(target) == len(source) - 2  # Both articles are left out.
        assert translations.setdefault(" ".join(source), " ".join(target)) == " ".join(target)
    assert len(set(translations.values())) == len(translations)
    assert pairs == sentences.generate(500, 5)  # The same on every worker.
    assert sentences.generate(5, 1)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = argparse.Namespace(width=8, heads=2, layers=2, dropout=0.0)
    return nmt.Translator(12, 14, sizes).eval()


def test_padding_changes_nothing(model: torch.nn.Module) -> None:
    long = (torch.tensor([2, 4, 5, 6, 7, 3]), torch.tensor([2, 8, 9, 4, 3]))
    short = (torch.tensor([2, 9, 3]), torch.tensor([2, 5, 3]))
    both = model(*sentences.pad([long, short]))
    apart = [model(*sentences.pad([pair])) for pair in (long, short)]
    assert nmt.num_tokens(sentences.pad([long, short])[1]) == 6
    torch.testing.assert_close(both, (apart[0] * 4 + apart[1] * 2) / 6)


def test_words_do_not_see_what_comes_later(model: torch.nn.Module) -> None:
    memory = model.encode(torch.tensor([[2, 4, 5, 3]]))
    first = model.decode(torch.tensor([[2, 5, 6, 7]]), *memory)
    other = model.decode(torch.tensor([[2, 5, 9, 3]]), *memory)
    torch.testing.assert_close(first[:, :2], other[:, :2])
    assert not torch.allclose(first[:, 2:], other[:, 2:])


def test_translation_ends(model: torch.nn.Module) -> None:
    source = torch.tensor([[2, 4, 5, 3], [2, 6, 3, 0]])
    with torch.no_grad():
        model.out.bias[sentences.END] = -100
        assert model.translate(source, 7).shape == (2, 8)
        model.out.bias[sentences.END] = 100
        assert model.translate(source, 7).tolist() == [[2, 3], [2, 3]]


def run_alone(*arguments: str, path: str = "") -> str:
    """What the script says before it gives up."""
    path = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(EXAMPLES / "nmt.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    return done.stderr


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "--source and --target belong together" in run_alone("--source", "a")
    (tmp_path / "sacrebleu.py").write_text("raise ImportError('not here')")
    assert "pip install sacrebleu" in run_alone(path=str(tmp_path))
