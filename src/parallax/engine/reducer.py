"""torch's own DDP reducer for a fixed list of parameters, without its `forward`.

[Note: copies] Only copies of gradients are divided in buckets, and they are copied back: torch may
let two gradients share memory, and views of buckets, which would save copies, would change under a
script that keeps a gradient while the next backward runs.
"""

# Without `annotations` from __future__: torch looks at those of the communication hook.

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from parallax.comm.direct import DirectSums
from parallax.comm.peers import Peers, communicating
from parallax.planning import cost


class Reducer:
    """All-reduces the gradients of some parameters, in buckets that overlap with backward."""

    def __init__(
        self,
        peers: Peers,
        group: dist.ProcessGroup,
        parameters: Mapping[str, nn.Parameter],
        bucket_megabytes: float | None,
        direct_sums: DirectSums | None,
    ) -> None:
        """`direct_sums` are used if all gradients are few bytes. See [Note: direct]."""
        self._peers = peers
        self._group = group
        size_bytes = sum(parameter.nbytes for parameter in parameters.values())
        self._direct_sums = direct_sums if size_bytes <= cost.DIRECT_BYTES else None
        self._sizes = sent_bytes(parameters, peers.num_workers)
        self._works: list[dist.Work] = []
        self._sums: list[Future[None]] = []
        self._is_laid_out = False
        """Whether torch has arranged its buckets by the order of the first gradients."""
        holder = nn.Module()
        holder.held = nn.ParameterList(list(parameters.values()))
        self._ddp = DistributedDataParallel(
            holder, process_group=group, bucket_cap_mb=bucket_megabytes, init_sync=False
        )
        self._ddp.register_comm_hook(None, self._reduce_bucket)

    def arm(self) -> None:
        """Expect one gradient of each parameter."""
        reducer = self._ddp.reducer
        if not self._is_laid_out:
            where = f"laying out gradient buckets in step {self._peers.step}"
            with self._peers.waiting(where), communicating():
                self._is_laid_out = bool(reducer._rebuild_buckets())
        reducer.prepare_for_backward([])

    def wait(self, where: str) -> None:
        """Wait for the all-reduces of this backward."""
        start = time.perf_counter()
        with self._peers.waiting(where):
            for work in self._works:
                self._peers.wait(work)
            for done in self._sums:
                done.result()
        self._works, self._sums = [], []
        names, sizes = self._sizes
        self._peers.ledger.add_shared(names, sizes, time.perf_counter() - start)

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        self._ddp.reducer._remove_autograd_hooks()

    def _reduce_bucket(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        values = bucket.buffer().div_(self._peers.num_workers)  # See [Note: copies].
        if self._direct_sums is not None:
            for_ddp, for_us = self._direct_sums.start(values)
            self._sums.append(for_us)
            return for_ddp
        work = dist.all_reduce(values, group=self._group, async_op=True)
        self._works.append(work)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def sent_bytes(
    parameters: Mapping[str, nn.Parameter], num_workers: int
) -> tuple[tuple[str, ...], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return names, and the bytes that go each way when their gradients are reduced."""
    sizes: Sequence[float] = [
        cost.allreduce_bytes(parameter.nbytes, num_workers) for parameter in parameters.values()
    ]
    return tuple(parameters), np.array(sizes, np.float64)
