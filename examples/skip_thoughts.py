"""Skip-thoughts: a sentence is read, and the ones before and after it are foretold from it.

    parallax run -n 2 examples/skip_thoughts.py --steps 500

`python examples/skip_thoughts.py` trains it on one device. The encoder and both decoders share the
vocabulary's tables, which Parallax shards by rows. Ends with the exact perplexity of held-out
neighbours.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from loop import steps, write_result
from text import END, Corpus, load_corpus
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import parallax

STOPS = (END, ".", "!", "?")


class SkipThoughts(nn.Module):
    """One GRU reads a sentence into a thought; two others go on from it, word by word."""

    def __init__(self, num_words: int, width: int, hidden: int, samples: int) -> None:
        super().__init__()
        self.padding = num_words  # The row behind the last word.
        self.embedding = nn.Embedding(num_words + 1, width, padding_idx=num_words)
        self.encoder = nn.GRU(width, hidden, batch_first=True)
        self.before = nn.GRU(width, hidden, batch_first=True)
        self.after = nn.GRU(width, hidden, batch_first=True)
        self.projection = nn.Linear(hidden, width)
        # A sum over words, divided by the sentences below: exact, however many words workers have.
        self.softmax = parallax.nn.SampledSoftmaxLoss(num_words, width, samples, reduction="sum")

    def forward(self, sentences: Tensor) -> Tensor:
        """The mean sampled loss of a sentence's neighbours."""
        return self.softmax(*self.read(sentences)) / len(sentences)

    def read(self, sentences: Tensor) -> tuple[Tensor, Tensor]:
        """What is known before each word of the neighbours, and those words.

        `sentences` has three for each sample: the one before, the one to read, the one after.
        """
        rows = self.embedding(sentences)
        before, sentence, after = sentences.unbind(1)
        states, _ = self.encoder(rows[:, 1])
        last = (sentence != self.padding).sum(1) - 1
        thought = states[torch.arange(len(last)), last][None]
        told = [
            decoder(torch.roll(rows[:, place], 1, 1).index_fill(1, torch.tensor([0]), 0), thought)
            for decoder, place in ((self.before, 0), (self.after, 2))
        ]
        targets = torch.stack([before, after])
        real = targets != self.padding
        return self.projection(torch.stack([states for states, _ in told])[real]), targets[real]

    @torch.no_grad()
    def perplexity(self, sentences: Tensor) -> float:
        """Exact, over all words."""
        return self.softmax.perplexity(*self.read(sentences))


def triples(corpus: Corpus, length: int) -> Tensor:
    """Each sentence between its neighbours, cut and padded to `length`: (samples, 3, length)."""
    stops = torch.tensor([i for i, word in enumerate(corpus.words) if word in STOPS])
    ends = torch.isin(corpus.ids, stops).nonzero().squeeze(1) + 1
    sentences = [s[:length] for s in corpus.ids.tensor_split(ends) if len(s) > 1]
    padded = pad_sequence(sentences, batch_first=True, padding_value=len(corpus.words))
    return padded.unfold(0, 3, 1).transpose(1, 2).contiguous()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A sentence encoder with two decoders.")
    add = parser.add_argument
    add("--text", type=Path, help="a plain text file (default: a sample of Wikipedia)")
    add("--max-words", type=int, default=20_000, help="words of the vocabulary, at most")
    add("--width", type=int, default=128, help="width of a word's row")
    add("--hidden", type=int, default=256, help="width of a thought")
    add("--samples", type=int, default=512, help="candidates of the sampled softmax")
    add("--length", type=int, default=24, help="words of a sentence, at most")
    add("--batch-size", type=int, default=16, help="sentences a worker and step")
    add("--steps", type=int, default=500)
    add("--lr", type=float, default=0.03)
    add("--eval-sentences", type=int, default=128, help="sentences held out for the perplexity")
    add("--out", type=Path, default=Path("runs/skip_thoughts"))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    corpus = load_corpus(args.text, args.max_words, args.out.parent)
    samples = triples(corpus, args.length)
    # Two are left out between: they have a sentence in common with the held-out ones.
    training, held_out = samples[: -args.eval_sentences - 2], samples[-args.eval_sentences :]
    loader = DataLoader(TensorDataset(training), args.batch_size, shuffle=True, drop_last=True)
    torch.manual_seed(0)
    model = SkipThoughts(len(corpus.words), args.width, args.hidden, args.samples)
    nn.init.normal_(model.embedding.weight, std=0.1)
    optimizer = torch.optim.Adagrad(model.parameters(), args.lr, initial_accumulator_value=1e-5)
    session = parallax.parallelize(model, optimizer)

    torch.manual_seed(1 + session.rank)  # Each worker draws its own candidates.
    for (sentences,) in steps(session, session.shard(loader), args.steps, "skip-thoughts"):
        model(sentences).backward()
        optimizer.step()
        optimizer.zero_grad()

    perplexity = model.perplexity(held_out)  # All together: lookups are collective.
    result = {
        "num_workers": session.num_workers,
        "num_words": len(corpus.words),
        "perplexity": perplexity,
        "bits_a_word": math.log2(perplexity),
    }
    write_result(result, args.out, session.rank)
    session.close()


if __name__ == "__main__":
    main()
