"""Direct sums: an all-reduce of few bytes in two exchanges.

[Note: direct] A ring of N workers takes 2(N - 1) turns. If it overlaps with an exchange of rows,
each turn queues behind the rows, and the last turns are waited for while the links are idle. So
small gradients are summed in two turns that move the same bytes: each worker receives one part of
all workers' values, sums it and sends the sum to all. For large gradients the ring is better,
because each link then has one sender only. The two are never mixed: turns of the ring would queue
behind the direct exchanges.

The second turn has a process group of its own. A thread starts these turns one after the other,
because the training thread may be waiting in the reducer.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.comm.peers import communicating
from parallax.comm.threads import BackgroundThread


class DirectSums:
    """Sums flat tensors over all workers, in place and in order."""

    def __init__(self, group: dist.ProcessGroup, sums: dist.ProcessGroup, num_workers: int) -> None:
        self._group, self._sums = group, sums
        self._num_workers = num_workers
        self._thread = BackgroundThread("parallax-sums")

    def start(self, values: Tensor) -> tuple[torch.futures.Future[Tensor], Future[None]]:
        """Return two futures: one for DDP's reducer, one that raises errors in the caller."""
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        size = -(-len(values) // self._num_workers)
        padded = values.new_zeros(size * self._num_workers)
        padded[: len(values)] = values
        parts = torch.empty_like(padded)
        work = dist.all_to_all_single(parts, padded, group=self._group, async_op=True)

        def finish() -> None:
            try:
                with communicating():
                    work.wait()
                part = parts.view(self._num_workers, -1).sum(0).repeat(self._num_workers)
                with communicating():
                    dist.all_to_all_single(padded, part, group=self._sums)
                values.copy_(padded[: len(values)])
            except BaseException as error:
                done.set_exception(error)  # type: ignore[arg-type]
                raise
            done.set_result(values)

        return done, self._thread.submit(finish)

    def close(self) -> None:
        self._thread.close()
