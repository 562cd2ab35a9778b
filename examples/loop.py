"""What every example has around its training step: enough batches, a progress bar, a result."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm


class Session(Protocol):
    """The part of `parallax.Session` that counts steps."""

    @property
    def rank(self) -> int: ...

    @property
    def step(self) -> int: ...


def steps(session: Session, loader: Iterable[Any], total: int, title: str) -> Iterator[Any]:
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


def write_result(result: dict[str, Any], out: Path, rank: int) -> None:
    """Worker 0 prints the figures and keeps them in `result.json`."""
    if rank == 0:
        for name, value in result.items():
            if isinstance(value, int | float):
                print(f"{name.replace('_', ' ')}: {value:,.4g}")
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result, indent=1))
