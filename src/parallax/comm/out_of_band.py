"""Out-of-band pulls: rows for a lookup whose prefetch had other ids.

[Note: out-of-band pull] Lookups that all workers have prefetched need no message. If one worker
looks up other ids after all, it requests their rows through the job's store. The heartbeat thread
of each owner answers, whatever its training thread is doing. That takes a second or two and is
rare: after a wrong guess a table is not prefetched for a while, and after three never again. The
rows are those that a normal lookup would have pulled, because every update needs a reduction, and
a reduction needs all workers.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from parallax.errors import WaitTimeoutError

_POLL_SECONDS = 0.02


class RowSource(Protocol):
    """Has the rows that this worker owns."""

    def owned_rows(self, table: str, places: Tensor) -> Tensor:
        """Return the rows at some places of this worker's shard, as they are sent."""


class OutOfBandPulls:
    """A worker's requests to the other workers, and its answers to theirs."""

    def __init__(self, store: Store, rank: int, timeout_seconds: float) -> None:
        self._source: RowSource | None = None
        self._store = store
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._num_answered = 0

    def serve_from(self, source: RowSource) -> None:
        """Answer requests from here on. Called once, when the tables are known."""
        assert self._source is None
        self._source = source

    def pull(self, table: str, counts: Sequence[int], places: Tensor) -> Tensor:
        """Return the rows at some places, which are sorted by owner, `counts` of each."""
        assert self._source is not None
        parts = places.split(list(counts))
        keys = {
            owner: self._request(owner, table, part)
            for owner, part in enumerate(parts)
            if len(part) and owner != self._rank
        }
        self._await(table, keys)
        rows = [
            _unpacked(self._store.get(f"{keys[owner]}/rows")).to(places.device)
            if owner in keys
            else self._source.owned_rows(table, part)
            for owner, part in enumerate(parts)
            if len(part)
        ]
        for key in keys.values():
            self._store.delete_key(f"{key}/rows")
        return torch.cat(rows)

    def answer_requests(self) -> None:
        """Answer all open requests. Called in another thread than `pull`."""
        if self._source is None:
            return
        num_requests = self._store.add(f"requests/{self._rank}", 0)
        while self._num_answered < num_requests:
            key = f"requests/{self._rank}/{self._num_answered + 1}"
            if not self._store.check([key]):  # It is counted first, and follows at once.
                return
            self._num_answered += 1
            table, _, places = self._store.get(key).partition(b"\0")
            rows = self._source.owned_rows(table.decode(), _unpacked(places))
            self._store.set(f"{key}/rows", _packed(rows))  # type: ignore[arg-type]
            self._store.delete_key(key)

    def _request(self, owner: int, table: str, places: Tensor) -> str:
        key = f"requests/{owner}/{self._store.add(f'requests/{owner}', 1)}"
        self._store.set(key, table.encode() + b"\0" + _packed(places))  # type: ignore[arg-type]
        return key

    def _await(self, table: str, keys: dict[int, str]) -> None:
        # Poll: a blocking wait would keep this worker's own answers from the store.
        deadline = time.monotonic() + self._timeout_seconds
        left = dict(keys)
        while left:
            left = {o: k for o, k in left.items() if not self._store.check([f"{k}/rows"])}
            if left and time.monotonic() > deadline:
                owners = " and ".join(f"worker {owner}" for owner in left)
                raise WaitTimeoutError(
                    f"worker {self._rank} waited {self._timeout_seconds:g} s in vain for rows of "
                    f"{table!r} from {owners}"
                )
            time.sleep(_POLL_SECONDS if left else 0.0)


def _packed(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor.cpu(), file)
    return file.getvalue()


def _unpacked(data: bytes) -> Tensor:
    found: Tensor = torch.load(io.BytesIO(data), weights_only=True)
    return found
