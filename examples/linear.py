"""Linear regression: the smallest possible training.

    parallax run -n 2 examples/linear.py --steps 200

`python examples/linear.py` trains it on one device. Its parameters are dense, so Parallax
all-reduces their gradients. The mean squared error ends near 0.01, the variance of the noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from loop import steps, write_result
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parallax


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear regression.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="samples a worker and step")
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/linear"))
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs, slope = torch.randn(10_000, args.features), torch.randn(args.features, 1)
    outputs = inputs @ slope + 3 + 0.1 * torch.randn(10_000, 1)
    loader = DataLoader(TensorDataset(inputs[1000:], outputs[1000:]), args.batch_size, shuffle=True)
    model = nn.Linear(args.features, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = parallax.parallelize(model, optimizer)

    for x, y in steps(session, session.shard(loader), args.steps, "linear"):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        error = nn.functional.mse_loss(model(inputs[:1000]), outputs[:1000])  # held out
    result = {"num_workers": session.num_workers, "mean_squared_error": float(error)}
    write_result(result, args.out, session.rank)
    session.close()


if __name__ == "__main__":
    main()
