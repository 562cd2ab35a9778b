"""Pairs of sentences that the translator reads: two text files, or a made-up pair of languages.

The made-up pair has a dictionary, word order and endings: "the red cat sees the dog" becomes the
words for "cat red-SUBJECT dog-OBJECT sees" (adjectives follow, the verb comes last, the article
is left out). Every sentence has one right translation, so a perfect BLEU can be reached.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PAD, UNKNOWN, BEGIN, END = range(4)
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]

Pair = tuple[list[str], list[str]]


class Vocabulary:
    """The most frequent words of one language, and the special ones before them."""

    def __init__(self, sentences: Iterable[list[str]], max_words: int) -> None:
        counts = Counter(word for sentence in sentences for word in sentence)
        self.words = SPECIAL + [word for word, _ in counts.most_common(max_words)]
        # A text may hold "<s>" itself; it is a word of its own there, never the special one.
        self._ids = {word: i for i, word in enumerate(self.words) if i >= len(SPECIAL)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: list[str]) -> Tensor:
        ids = [self._ids.get(word, UNKNOWN) for word in sentence]
        return torch.tensor([BEGIN, *ids, END])

    def decode(self, ids: list[int]) -> list[str]:
        """The words after the beginning and before the end."""
        ids = ids[1:]
        return [self.words[i] for i in (ids[: ids.index(END)] if END in ids else ids)]


def pad(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sentences side by side, the short ones filled up."""
    sources, targets = zip(*batch, strict=True)
    return (
        pad_sequence(list(sources), batch_first=True, padding_value=PAD),
        pad_sequence(list(targets), batch_first=True, padding_value=PAD),
    )


def read_pairs(source: Path, target: Path, max_length: int) -> list[Pair]:
    """The lines of two files that belong together; empty and longer ones are left out."""
    sources, targets = _lines(source), _lines(target)
    if len(sources) != len(targets):
        raise SystemExit(
            f"{source} has {len(sources)} lines and {target} has {len(targets)}: line N of one "
            "must be the translation of line N of the other."
        )
    pairs = [(s.split(), t.split()) for s, t in zip(sources, targets, strict=True)]
    kept = [pair for pair in pairs if all(0 < len(words) <= max_length for words in pair)]
    if len(kept) < 2:
        raise SystemExit(
            f"{source} and {target}: of {len(pairs)} pairs of lines {len(kept)} have 1 to "
            f"{max_length} words on both sides; at least 2 are needed. See --max-length."
        )
    return kept


def _lines(path: Path) -> list[str]:
    try:
        # Not splitlines(): it also cuts at rarer separators, and the files would be out of step.
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise SystemExit(f"Cannot read {path}: {error.strerror}.") from None
    return text.removesuffix("\n").split("\n") if text else []


def generate(num_pairs: int, num_words: int, seed: int = 0) -> list[Pair]:
    """Sentences in two made-up languages with `num_words` nouns, verbs and adjectives each."""
    draw = random.Random(seed)
    roots = _words(draw, 6 * num_words)
    kinds = [roots[i * num_words : (i + 1) * num_words] for i in range(6)]
    nouns, verbs, adjectives = (dict(zip(kinds[i], kinds[i + 3], strict=True)) for i in range(3))

    def phrase(ending: str) -> Pair:
        noun = draw.choice(list(nouns))
        described = draw.sample(list(adjectives), draw.choice([0, 1, 1, min(2, num_words)]))
        words = [nouns[noun], *(adjectives[word] for word in described)]
        return ["the", *described, noun], [*words[:-1], words[-1] + ending]

    pairs = []
    for _ in range(num_pairs):
        (subject, first), (object_, second) = phrase("o"), phrase("im")
        verb = draw.choice(list(verbs))
        pairs.append(([*subject, verb, *object_], [*first, *second, verbs[verb]]))
    return pairs


def _words(draw: random.Random, count: int) -> list[str]:
    """Distinct words of two or three syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = [draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)]
        found["".join(syllables[: draw.choice([2, 3, 3])]) + draw.choice("lnrst")] = None
    return list(found)
