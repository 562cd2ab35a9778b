"""Horovod over gloo, as its guide to PyTorch has it: a `DistributedOptimizer` and a broadcast.

Gradients of `nn.Embedding(sparse=True)` are gathered as rows, its default (a row that a batch looks
up twice goes twice); `sparse_as_dense` would send whole tables. Fusion, cycles and caches are as it
sets them.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import horovod.torch as hvd
import torch.distributed as dist
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

from benchmarks.engines.task import PATIENCE_SECONDS, Task, Trainer, train


def start(task: Task) -> Trainer:
    _meet(task)
    model = task.model(sparse=True)
    plain = task.adagrad(model.parameters())
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    # It makes Adagrad anew, by which the sums of squares start at 0, not where they should.
    optimizer.load_state_dict(plain.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return train(task, model, optimizer)


def _meet(task: Task) -> None:
    """What `horovodrun` does before it starts the workers, which run already."""
    counts = Counter(os.environ["BENCHMARK_HOSTS"].split(","))
    hosts = parse_hosts(",".join(f"{host}:{count}" for host, count in counts.items()))
    slots = get_host_assignments(hosts, task.num_workers)
    address, is_first = os.environ["MASTER_ADDR"], task.rank == 0
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        address, int(os.environ["MASTER_PORT"]), task.num_workers, is_first
    )
    if is_first:
        server = RendezvousServer()
        port = server.start()
        server.init(slots)
        store.set("port", str(port))
    run = create_run_env_vars(address, [os.environ["GLOO_SOCKET_IFNAME"]], int(store.get("port")))
    os.environ.update(create_slot_env_vars(slots[task.rank]))
    os.environ.update({name: str(value) for name, value in run.items()})
    # Its 30 seconds would pass while other engines take their turns.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = f"{PATIENCE_SECONDS:.0f}"
    hvd.init()
