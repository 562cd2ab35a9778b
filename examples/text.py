"""The words that the language model reads: a sample of Wikipedia, or any plain text file.

The sample (a few hundred articles) lies inside the wheel of gensim, as its test data. The
package is only a carrier: it is located, never imported, so none of its dependencies are needed.
"""

from __future__ import annotations

import bz2
import hashlib
import html
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import Tensor

UNKNOWN, END = "<unk>", "<eos>"
WIKI_SAMPLE = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"

_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|[.,;:!?()]")
# Elements go first, with what they enclose; then what nests, from the inside; then single marks.
_ELEMENTS = [
    re.compile(r"<!--.*?-->", re.S),
    re.compile(r"<(ref|math|gallery|timeline|code|pre)\b[^>]*?/>", re.S),
    re.compile(r"<(ref|math|gallery|timeline|code|pre)\b.*?</\1>", re.S),
    re.compile(r"<[^<>]*>"),
]
_NESTED = [
    re.compile(r"\{\{[^{}]*\}\}"),
    re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.S),
    re.compile(r"\[\[(?:file|image|category|[a-z]{2,3}):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", re.I),
]
_MARKS = [
    (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"\[\w+://\S+\s*([^\]]*)\]"), r"\1"),
    (re.compile(r"\w+://\S+"), " "),
    (re.compile(r"^\s*[=|!{}].*$", re.M), " "),
    (re.compile(r"'{2,}"), ""),
]


@dataclass(frozen=True)
class Corpus:
    """A text as word ids, most frequent word first."""

    words: list[str]
    ids: Tensor


def load_corpus(text: Path | None, max_words: int, cache: Path) -> Corpus:
    """Read `text` (None: the Wikipedia sample) with the `max_words` most frequent words.

    The ids are kept in `cache`, so that only the first run has to clean the text. Several workers
    may call this at once: each writes a file of its own and renames it.
    """
    source = _locate(text)
    status = source.stat()
    key = f"{source.resolve()}|{status.st_size}|{status.st_mtime_ns}|{max_words}"
    cached = cache / f"words-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"
    if cached.exists():
        return Corpus(**torch.load(cached, weights_only=True))
    corpus = _number(list(_words(source)), max_words)
    cache.mkdir(parents=True, exist_ok=True)
    # A name of its own by chance: processes of several hosts may have the same number.
    with tempfile.NamedTemporaryFile(dir=cache, suffix=".tmp", delete=False) as own:
        torch.save({"words": corpus.words, "ids": corpus.ids}, own)
    Path(own.name).replace(cached)
    return corpus


def _locate(text: Path | None) -> Path:
    if text is not None:
        if not text.is_file():
            raise SystemExit(f"No text at {text}: give an existing plain text file with --text.")
        return text
    spec = find_spec("gensim")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (sample := Path(folder) / WIKI_SAMPLE).is_file():
            return sample
    raise SystemExit(
        "No text to train on: the Wikipedia sample comes with gensim, which is not installed.\n"
        "Install it with `pip install --no-deps gensim`, or give a plain text file with --text."
    )


def _words(source: Path) -> Iterator[str]:
    paragraphs = _wiki_paragraphs(source) if source.suffix == ".bz2" else _lines(source)
    for paragraph in paragraphs:
        found = _WORD.findall(paragraph.lower())
        if found:
            yield from found
            yield END


def _lines(source: Path) -> Iterator[str]:
    with source.open(encoding="utf-8", errors="replace") as lines:
        yield from lines


def _wiki_paragraphs(source: Path) -> Iterator[str]:
    with bz2.open(source) as stream:
        for _, element in ElementTree.iterparse(stream):
            name = element.tag.rpartition("}")[2]
            if name == "text" and element.text and not element.text.startswith("#"):
                for line in clean_markup(element.text).splitlines():
                    # What is left of lists and captions is short; sentences are not.
                    if len(line) > 60:
                        yield line.lstrip("*#:; ")
            elif name == "page":
                element.clear()


def clean_markup(text: str) -> str:
    """Take the wiki markup out of an article, one paragraph a line."""
    text = html.unescape(text)
    for element in _ELEMENTS:
        text = element.sub(" ", text)
    for innermost in _NESTED:
        count = 1
        while count:
            text, count = innermost.subn(" ", text)
    for mark, kept in _MARKS:
        text = mark.sub(kept, text)
    return text


def _number(words: list[str], max_words: int) -> Corpus:
    """Give ids by falling frequency, which is what a log-uniform sampler expects."""
    counts = Counter(words)
    dropped = [word for word, _ in counts.most_common()[max_words:] if word != END]
    counts[UNKNOWN] = sum(counts.pop(word) for word in dropped)
    counts[END] += 0  # In the vocabulary even when the text has no line end.
    vocabulary = [word for word, _ in counts.most_common()]
    index = {word: i for i, word in enumerate(vocabulary)}
    return Corpus(vocabulary, torch.tensor([index.get(word, index[UNKNOWN]) for word in words]))
