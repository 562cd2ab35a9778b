"""Rows for a lookup that was foreseen with other ids.

[Note: detour] Lookups that were foreseen on all workers need no message. If the ids of one are
others after all, its worker asks the owners by way of the job's store, where the thread that keeps
their notes answers, whatever they are doing themselves. That takes a second or two, and is rare: a
table that was guessed wrongly is not guessed again at once, and after three times never. The rows
are those that a lookup would have found: every update needs a reduction, which needs all workers.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from parallax.errors import WaitTimeoutError

_PAUSE_SECONDS = 0.02

Serve = Callable[[str, Tensor], Tensor]
"""(table, places) → the rows that this worker owns there."""


class Detours:
    """A worker's requests to the others, and its answers to theirs."""

    def __init__(self, store: Store, rank: int, timeout_seconds: float) -> None:
        self.serve: Serve = lambda name, places: places[:0]
        self._store = store
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._num_answered = 0

    def ask(self, name: str, counts: Sequence[int], places: Tensor) -> Tensor:
        """The rows at some places, sorted by owner, `counts` of each."""
        parts = places.split(list(counts))
        keys = {
            owner: self._request(owner, name, part)
            for owner, part in enumerate(parts)
            if len(part) and owner != self._rank
        }
        self._await(name, keys)
        rows = [
            _unpacked(self._store.get(f"{keys[owner]}/rows")).to(places.device)
            if owner in keys
            else self.serve(name, part)
            for owner, part in enumerate(parts)
            if len(part)
        ]
        for key in keys.values():
            self._store.delete_key(f"{key}/rows")
        return torch.cat(rows)

    def answer(self) -> None:
        """Answer what has been asked. Called in another thread than `ask`."""
        asked = self._store.add(f"detours/{self._rank}", 0)
        while self._num_answered < asked:
            key = f"detours/{self._rank}/{self._num_answered + 1}"
            if not self._store.check([key]):  # Its number comes first; it follows at once.
                return
            self._num_answered += 1
            name, _, places = self._store.get(key).partition(b"\0")
            rows = self.serve(name.decode(), _unpacked(places))
            self._store.set(f"{key}/rows", _packed(rows))  # type: ignore[arg-type]
            self._store.delete_key(key)

    def _request(self, owner: int, name: str, places: Tensor) -> str:
        key = f"detours/{owner}/{self._store.add(f'detours/{owner}', 1)}"
        self._store.set(key, name.encode() + b"\0" + _packed(places))  # type: ignore[arg-type]
        return key

    def _await(self, name: str, keys: dict[int, str]) -> None:
        # Asked again and again: a wait would keep this worker's own answers from the store.
        deadline = time.monotonic() + self._timeout_seconds
        left = dict(keys)
        while left:
            left = {o: k for o, k in left.items() if not self._store.check([f"{k}/rows"])}
            if left and time.monotonic() > deadline:
                owners = " and ".join(f"worker {owner}" for owner in left)
                raise WaitTimeoutError(
                    f"worker {self._rank} waited {self._timeout_seconds:g} s in vain for rows of "
                    f"{name!r} from {owners}"
                )
            time.sleep(_PAUSE_SECONDS if left else 0.0)


def _packed(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor.cpu(), file)
    return file.getvalue()


def _unpacked(data: bytes) -> Tensor:
    found: Tensor = torch.load(io.BytesIO(data), weights_only=True)
    return found
