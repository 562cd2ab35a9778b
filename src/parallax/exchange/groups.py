"""The process groups of a session. Nobody else makes any."""

from __future__ import annotations

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from parallax.cluster import Place
from parallax.errors import WaitTimeoutError


class Groups:
    """The process groups of a session; none with one worker."""

    def __init__(self, place: Place, device: torch.device, timeout_seconds: float) -> None:
        self.control: dist.ProcessGroup | None = None
        self.rows: dist.ProcessGroup | None = None
        self.dense: dist.ProcessGroup | None = None
        if place.num_workers == 1:
            return
        timeout = timedelta(seconds=timeout_seconds)
        if not dist.is_initialized():
            both = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                dist.init_process_group(both, timeout=timeout)
            except RuntimeError as error:
                raise WaitTimeoutError(
                    f"worker {place.rank} of {place.num_workers} did not find all others in "
                    f"{timeout_seconds:g} s: some did not reach parallelize(); see their errors"
                ) from error
            atexit.register(_leave)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        self.rows = dist.new_group(backend=backend, timeout=timeout)
        self.dense = dist.new_group(backend=backend, timeout=timeout)

    def store(self) -> Store:
        store: Store = dist.distributed_c10d._get_default_store()
        # A connection of its own: the training thread may stand in the other one.
        return store.clone() if hasattr(store, "clone") else store

    def close(self) -> None:
        for group in (self.control, self.rows, self.dense):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


def _leave() -> None:
    """At the end of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
