"""An all-reduce of few bytes in two exchanges.

[Note: direct] A ring of N workers takes 2(N - 1) turns. Beside rows, each turn stands in line
behind what the links carry already, and the last ones are waited for while the links are idle. So
few gradients are summed in two turns, with the same bytes: each worker gets a part of all
workers' values, sums it and sends the sum to all. For many bytes the ring is the better one,
because a link then has one sender only; and not for some of them beside the ring, whose turns
would stand in line behind them.

The second turn has a group of its own, on which a thread starts one after the other: the reducer
may be waiting in the training thread.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.comm.courier import Courier
from parallax.comm.peers import communicating


class DirectSums:
    """Sums flat tensors over all workers, in place and in order."""

    def __init__(self, group: dist.ProcessGroup, sums: dist.ProcessGroup, num_workers: int) -> None:
        self._group, self._sums = group, sums
        self._num_workers = num_workers
        self._courier = Courier("parallax-sums")

    def start(self, values: Tensor) -> tuple[torch.futures.Future[Tensor], Future[None]]:
        """Told twice when it is done: for the reducer, and for who wants to see errors."""
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

        return done, self._courier.send(finish)

    def close(self) -> None:
        self._courier.close()
