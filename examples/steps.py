"""What every example has around its training step: enough batches, a progress bar, a result."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm


def take(batches: Iterable[Any], steps: int, title: str, rank: int) -> Iterable[Any]:
    """So many batches, in as many passes as it takes; worker 0 shows a bar."""
    taken = itertools.islice(_endless(batches), steps)
    if rank != 0:
        return taken
    # The launcher keeps worker 0's bar on the terminal's last line.
    return tqdm(taken, title, steps, unit="step", file=sys.stdout, ncols=68)


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    found = False
    while True:
        for batch in batches:
            found = True
            yield batch
        if not found:
            raise SystemExit("There is too little data for one batch: take a smaller --batch-size.")


def write_result(result: dict[str, Any], out: Path, rank: int) -> None:
    """Worker 0 prints the figures and keeps them in `result.json`."""
    if rank == 0:
        for name, value in result.items():
            if isinstance(value, int | float):
                print(f"{name.replace('_', ' ')}: {value:,.4g}")
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result, indent=1))
