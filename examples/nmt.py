"""A translator, a Transformer with two vocabularies, trained data-parallel.

    parallax run -n 2 examples/nmt.py --source train.en --target train.de --steps 20000

The files have a sentence a line, its words apart by spaces. Without them it learns a made-up pair
of languages (see sentences.py); `python examples/nmt.py` does so on one device. Most parameters
are dense. The two embeddings are tables, with a SparseAdam of their own. A batch's loss is its mean
over the words of the translations, which differ between workers; `session.weight` tells how many
there are. The figures are the loss and the BLEU of held-out sentences, greedily translated.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from loop import steps
from sentences import BEGIN, END, PAD, Vocabulary, generate, pad, read_pairs
from torch import Tensor, nn
from torch.utils.data import DataLoader

import parallax

try:
    from sacrebleu import corpus_bleu
except ImportError as error:
    raise SystemExit(f"BLEU needs sacrebleu ({error}): `pip install sacrebleu`.") from None


class Translator(nn.Module):
    """Encoder and decoder of torch's own layers."""

    def __init__(self, sources: int, targets: int, args: argparse.Namespace) -> None:
        super().__init__()
        width = args.width
        self.source = nn.Embedding(sources, width, padding_idx=PAD, sparse=True)
        self.target = nn.Embedding(targets, width, padding_idx=PAD, sparse=True)
        for table in (self.source, self.target):
            nn.init.normal_(table.weight, std=width**-0.5)
        options = {"dropout": args.dropout, "batch_first": True, "norm_first": True}
        encoder = nn.TransformerEncoderLayer(width, args.heads, 4 * width, **options)
        decoder = nn.TransformerDecoderLayer(width, args.heads, 4 * width, **options)
        self.encoder = nn.TransformerEncoder(
            encoder, args.layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(decoder, args.layers, nn.LayerNorm(width))
        self.out = nn.Linear(width, targets)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The mean loss of each word of the translation, from those before it."""
        logits = self.out(self.decode(target[:, :-1], *self.encode(source)))
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        padding = source == PAD
        return self.encoder(place(self.source(source)), src_key_padding_mask=padding), padding

    def decode(self, target: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        # A word never sees what comes later, so the filling at the end needs no mask.
        return self.decoder(
            place(self.target(target)), memory, tgt_mask=later, memory_key_padding_mask=padding
        )

    def translate(self, source: Tensor, max_length: int) -> Tensor:
        """The likeliest next word, one after the other."""
        memory, padding = self.encode(source)
        target = torch.full_like(source[:, :1], BEGIN)
        while target.shape[1] <= max_length and not (target == END).any(1).all():
            logits = self.out(self.decode(target, memory, padding)[:, -1])
            target = torch.cat([target, logits.argmax(1, keepdim=True)], 1)
        return target


def place(vectors: Tensor) -> Tensor:
    """Words' vectors with waves added that tell their positions."""
    length, width = vectors.shape[1:]
    rates = torch.exp(torch.arange(0, width, 2, device=vectors.device) * (-math.log(1e4) / width))
    angles = torch.arange(length, device=vectors.device).unsqueeze(1) * rates
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
    return vectors * width**0.5 + waves[:, :width]


def num_tokens(target: Tensor) -> int:
    return int((target[:, 1:] != PAD).sum())


@torch.no_grad()
def evaluate(
    model: Translator, loader: DataLoader, words: Vocabulary, references: list[str], length: int
) -> tuple[float, float]:
    """The mean loss of a word, and BLEU."""
    model.eval()
    losses, tokens, translations = 0.0, 0, []
    for source, target in loader:
        losses += float(model(source, target)) * num_tokens(target)
        tokens += num_tokens(target)
        translated = model.translate(source, length + 1).tolist()
        translations += [" ".join(words.decode(ids)) for ids in translated]
    return losses / tokens, corpus_bleu(translations, [references], force=True).score


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--source", type=Path, help="sentences, one a line")
    add("--target", type=Path, help="their translations")
    add("--sentences", type=int, default=20_000, help="made up: pairs of sentences")
    add("--words", type=int, default=50, help="made up: nouns, verbs and adjectives, each")
    add("--max-words", type=int, default=50_000, help="words of a vocabulary, at most")
    add("--max-length", type=int, default=60, help="words of a sentence, at most")
    add("--held-out", type=int, default=200, help="sentences for the loss and BLEU")
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--layers", type=int, default=2)
    add("--dropout", type=float, default=0.1)
    add("--batch-size", type=int, default=64, help="sentences a step, of all workers together")
    add("--steps", type=int, default=1000)
    add("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    if (args.source is None) != (args.target is None):
        parser.error("--source and --target belong together: give both, or none")
    return args


def main() -> None:
    args = parse_args()
    if args.source:
        pairs = read_pairs(args.source, args.target, args.max_length)
    else:
        pairs = generate(args.sentences, args.words)
    held_out, pairs = pairs[: args.held_out], pairs[args.held_out :]
    sources, targets = (Vocabulary([pair[i] for pair in pairs], args.max_words) for i in (0, 1))
    encoded = [[(sources.encode(s), targets.encode(t)) for s, t in p] for p in (pairs, held_out)]
    loader = DataLoader(encoded[0], args.batch_size, shuffle=True, drop_last=True, collate_fn=pad)

    torch.manual_seed(0)
    model = Translator(len(sources), len(targets), args)
    tables = [model.source.weight, model.target.weight]
    dense = [p for part in (model.encoder, model.decoder, model.out) for p in part.parameters()]
    sparse_optimizer = torch.optim.SparseAdam(tables, args.lr)
    optimizer = torch.optim.Adam(dense, args.lr)
    session = parallax.parallelize(model, [sparse_optimizer, optimizer])

    # Parallax cuts every batch into a share for each worker.
    for source, target in steps(session, session.shard(loader, split=True), args.steps, "nmt"):
        session.weight(num_tokens(target))
        model(source, target).backward()
        for each in (sparse_optimizer, optimizer):
            each.step()
            each.zero_grad()

    state = session.state_dict()
    if session.rank == 0:  # Alone, with all rows: how many words come is not known beforehand.
        print(session.plan)
        alone = Translator(len(sources), len(targets), args)
        alone.load_state_dict(state)
        tests = DataLoader(encoded[1], args.batch_size, collate_fn=pad)
        references = [" ".join(target) for _, target in held_out]
        loss, bleu = evaluate(alone, tests, targets, references, args.max_length)
        print(f"loss {loss:.3f} and BLEU {bleu:.1f} of {len(references)} held-out sentences")
    session.close()


if __name__ == "__main__":
    main()
