"""The examples, run as a user runs them, on a small text."""

from __future__ import annotations

import bz2
import importlib
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES = ["--width", "16", "--hidden", "32", "--samples", "20", "--batch-size", "8"]
SIZES += ["--window", "10", "--eval-windows", "16"]
TABLES = {"embedding.weight", "softmax.table.weight", "softmax.bias.weight"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of 60 words in which each word follows one of two, so there is much to learn."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=6)) for _ in range(60)]
    word, lines = 0, []
    for _ in range(400):
        line = []
        for _ in range(20):
            word = (2 * word + generator.randint(0, 1)) % len(words)
            line.append(words[word])
        lines.append(" ".join(line))
    path = tmp_path_factory.mktemp("text") / "a text.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Import a module of the examples folder, as its scripts do."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in (sys.executable, *command)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120)


def run_example(script: str, out: Path, *arguments: object) -> dict:
    """The figures of an example that two workers have run."""
    launch = ["-m", "parallax.launch.command", "run", "-n", 2]
    done = run(*launch, EXAMPLES / script, "--out", out, *arguments, cwd=out.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["num_workers"] == 2
    return result


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# Not ddp-sparse: torch's sparse all-reduce over gloo rarely aborts the process (torch 2.13,
# "malloc(): unaligned tcache chunk"), and a test of ours must not depend on it.
@pytest.mark.parametrize("engine", ["parallax", "ddp"])
def test_language_model_learns_and_writes_its_outputs(
    engine: str, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs" / engine
    out.parent.mkdir()
    script = {"parallax": ["lm1b.py", out], "ddp": ["lm1b_ddp.py", out, "--engine", "ddp"]}
    result = run_example(*script[engine], *SIZES, "--text", text, "--steps", 120)

    assert result["num_words"] == 62  # Sixty words, the end of a line and the unknown word.
    # From a guess among the target and 20 candidates towards a choice between two words.
    assert 2.4 < mean(result["losses"][:5]) < 3.6
    assert math.log(2) < mean(result["losses"][-10:]) < 1.7
    assert 2 < result["perplexity"] < 12  # 62 for a guess among all words.
    assert set(result["bytes_a_step"]) > TABLES
    assert all(size > 0 for size in result["bytes_a_step"].values())
    state = torch.load(out / "model.pt", weights_only=True)
    assert state["embedding.weight"].shape == (62, 16)
    assert (out / "checkpoint").exists() == (engine == "parallax")


def test_language_model_learns_as_well_in_fewer_bits(tmp_path: Path) -> None:
    """On real text (of Python's own manual), with the same batches and candidates."""
    text = tmp_path / "manual.txt"
    text.write_text("\n".join(topics.values()))
    sizes = ["--width", 64, "--hidden", 64, "--samples", 256, "--batch-size", 16, "--steps", 150]
    found = {
        wire: run_example(
            "lm1b.py", tmp_path / wire, "--text", text, "--wire", wire, *sizes, "--lr", 0.1
        )
        for wire in ("float32", "bf16", "int8")
    }
    losses = {wire: mean(result["losses"][-20:]) for wire, result in found.items()}
    assert losses["float32"] < 0.9 * found["float32"]["losses"][0]
    moved = {wire: result["bytes_a_step"]["embedding.weight"] for wire, result in found.items()}
    for wire, part in (("bf16", 0.51), ("int8", 0.28)):  # Ids are a part of it.
        assert losses[wire] == pytest.approx(losses["float32"], rel=0.01)
        assert found[wire]["perplexity"] == pytest.approx(found["float32"]["perplexity"], rel=0.05)
        assert moved[wire] < part * moved["float32"]


def test_language_model_trains_on_one_device(text: Path, tmp_path: Path) -> None:
    """With what the paper's preset has beside its sizes; other options win over it."""
    out = tmp_path / "alone"
    sizes = ["--max-words", 60, "--rows", 100, *SIZES]
    arguments = ["--preset", "paper", "--text", text, "--out", out, "--steps", 20, *sizes]
    done = run(EXAMPLES / "lm1b.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert (result["num_workers"], len(result["losses"])) == (1, 20)
    assert mean(result["losses"][-5:]) < mean(result["losses"][:5])
    assert torch.load(out / "model.pt", weights_only=True)["embedding.weight"].shape == (100, 16)


def test_the_paper_s_model_can_be_built_on_meta(example) -> None:
    lm1b = example("lm1b")
    args = lm1b.parse_args(lm1b.make_parser(), ["--preset", "paper", "--steps", "3"])
    model, optimizer = lm1b.build(args, num_words=40_000, device="meta")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["embedding.weight"] == shapes["softmax.table.weight"] == (793_470, 512)
    assert shapes["lstm.weight_hr_l0"] == (512, 2048)
    assert model.softmax.proposal.num_samples == 8192
    assert (args.steps, args.batch_size, args.window) == (3, 128, 20)
    assert (optimizer.defaults["lr"], optimizer.defaults["initial_accumulator_value"]) == (
        0.2,
        1 / 400,
    )
    assert {name for name, p in model.named_parameters() if p.is_meta} == TABLES
    assert set(lm1b.start_values(512)) == TABLES


def test_word2vec_ranks_true_neighbours_first(text: Path, tmp_path: Path) -> None:
    sizes = ["--width", 16, "--reach", 1, "--pool", 32, "--subsample", 1, "--batch-size", 64]
    result = run_example("word2vec.py", tmp_path / "out", "--text", text, "--steps", 300, *sizes)
    assert result["num_words"] == 62
    # Before training: six times log 2. Measured: 1.01.
    assert 0.7 < result["loss"] < 1.4
    # A word has two that may stand before it and two after it: 1.5 at best, 30 for a guess.
    # Measured: 3.2.
    assert 1.5 < result["mean_rank"] < 6 < result["mean_rank_at_start"]
    assert len(result["nearest"]) == 5
    assert all(len(others) == 5 for others in result["nearest"].values())


def test_skip_thoughts_learns_to_tell_neighbours(text: Path, tmp_path: Path) -> None:
    sizes = ["--width", 16, "--hidden", 32, "--samples", 20, "--batch-size", 8, "--length", 12]
    arguments = ["--text", text, "--steps", 150, "--eval-sentences", 32, *sizes]
    result = run_example("skip_thoughts.py", tmp_path / "out", *arguments)
    assert result["num_words"] == 62
    # A choice between two for all words but a sentence's first; 62 for a guess. Measured: 3.0.
    assert 2 < result["perplexity"] < 4.5


def test_linear_ends_at_the_noise(tmp_path: Path) -> None:
    result = run_example("linear.py", tmp_path / "out", "--steps", 200)
    # The noise has a variance of 0.01; a sample of 1,000 errors shows it within 10% or so.
    assert 0.008 < result["mean_squared_error"] < 0.012


def test_demo_ends_with_a_table(text: Path, tmp_path: Path) -> None:
    arguments = ["--text", text, "--steps", 10, "--engines", "parallax", "ddp", *SIZES]
    done = run(EXAMPLES / "demo.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("Parallax     DDP dense", "words a second", "perplexity", *TABLES):
        assert part in done.stdout
    assert "runs/demo/parallax/checkpoint" in done.stdout
    assert (tmp_path / "runs/demo/ddp/result.json").exists()


def test_demo_reports_a_failed_training(text: Path, tmp_path: Path) -> None:
    # More candidates than words: the model refuses.
    arguments = ["--text", text, "--steps", 10, "--samples", 1000]
    done = run(EXAMPLES / "demo.py", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "The training with Parallax failed" in done.stderr
    assert "num_samples=1000: take 1 to 62" in done.stderr


def test_missing_text_says_what_to_do(tmp_path: Path) -> None:
    done = run(EXAMPLES / "demo.py", "--text", tmp_path / "none.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert "No text at" in done.stderr


def test_markup_is_taken_out(example) -> None:
    article = (
        "{{Infobox|a={{nested}}}}'''Bold''' [[page|shown]] and [[plain]].<ref name=x>no</ref>\n"
        "[[File:a.png|thumb|with [[link]]]]{| class=x\n| cell\n|}\n== Heading ==\n"
        "See [http://example.org the site] &amp; more<!-- hidden -->."
    )
    words = example("text").clean_markup(article).split()
    assert words == "Bold shown and plain. See the site & more .".split()


def test_articles_of_a_dump_are_read_and_redirections_are_not(example, tmp_path: Path) -> None:
    article = "A [[x|long sentence]] of an article, with ''marks'', and more than 60 letters."
    pages = [f"{article}\n* short\n{article}", "#REDIRECT [[elsewhere]] " + "and so on " * 20]
    texts = "".join(f"<page><revision><text>{page}</text></revision></page>" for page in pages)
    dump = tmp_path / "dump.xml.bz2"
    dump.write_bytes(bz2.compress(f'<mediawiki xmlns="a:b">{texts}</mediawiki>'.encode()))
    corpus = example("text").load_corpus(dump, 100, tmp_path)
    words = "a long sentence of an article , with marks , and more than 60 letters . <eos>".split()
    assert [corpus.words[i] for i in corpus.ids] == 2 * words


def test_vocabulary_is_cut_and_ordered_by_frequency(example, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("b a a\na c b\na d\n")
    corpus = example("text").load_corpus(tmp_path / "words.txt", 3, tmp_path)
    assert corpus.words[0] == "a"
    assert set(corpus.words) == {"a", "b", "<eos>", "<unk>"}
    again = example("text").load_corpus(tmp_path / "words.txt", 3, tmp_path)
    assert again.words == corpus.words
    assert torch.equal(again.ids, corpus.ids)
    assert [corpus.words[i] for i in corpus.ids[:4]] == ["b", "a", "a", "<eos>"]
