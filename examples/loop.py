"""What the training loops of the examples share: batches for a number of steps, with a bar."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

import parallax


def steps(session: parallax.Session, loader: Iterable[Any], total: int, title: str) -> Iterator:
    """Batches until the session has taken `total` steps, over as many epochs as that needs."""
    left = range(session.step, total)
    if session.rank == 0:  # The launcher keeps worker 0's bar on the terminal's last line.
        left = tqdm(left, title, unit="step", file=sys.stdout, ncols=68)
    # The numbers come first: a batch that is drawn and not trained on would be lost.
    for _, batch in zip(left, _endless(loader), strict=False):
        yield batch


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        num_batches = 0
        for num_batches, batch in enumerate(loader, 1):  # noqa: B007
            yield batch
        if num_batches == 0:
            raise SystemExit("There is less data than one batch: take a smaller --batch-size.")
