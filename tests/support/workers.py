"""Real workers: processes on loopback that run a function of a test."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from tests.support.namespaces import rename_host

_context = multiprocessing.get_context("forkserver")
# Workers are forked from a process that has imported torch already: milliseconds, not seconds.
_context.set_forkserver_preload(["torch._dynamo", "parallax.api"])


@dataclass
class Outcome:
    """What became of a worker."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0
    exit_code: int | None = None


def run_on_hosts(function: Callable[..., Any], hosts: Sequence[int], *args: Any) -> list[Any]:
    """The same on workers of several hosts, so many on each."""
    if len(hosts) == 1:
        return run_workers(function, hosts[0], *args)
    if os.geteuid() != 0:
        pytest.skip("hosts of their own names need root")
    names = [f"host{host}" for host, number in enumerate(hosts) for _ in range(number)]
    return run_workers(_renamed, len(names), names, function, args)


def _renamed(names: list[str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rename_host(names[int(os.environ["RANK"])])
    return function(*args)


def run_workers(
    function: Callable[..., Any], num_workers: int, *args: Any, timeout_seconds: float = 90
) -> list[Any]:
    """Results of `function(*args)` on each worker; the first failure is raised."""
    outcomes = outcomes_of(function, num_workers, *args, timeout_seconds=timeout_seconds)
    for outcome in outcomes:
        if outcome.error is not None or outcome.exit_code not in (0, None):
            raise AssertionError(
                f"worker {outcome.rank} failed (exit code {outcome.exit_code}):\n{outcome.trace}"
            )
    return [outcome.result for outcome in outcomes]


def outcomes_of(
    function: Callable[..., Any], num_workers: int, *args: Any, timeout_seconds: float = 90
) -> list[Outcome]:
    """What became of each worker; one that is still there after the timeout is an error."""
    store = _store()
    pipes, processes = [], []
    for rank in range(num_workers):
        here, there = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_run, args=(function, args, rank, num_workers, store.port, there), daemon=False
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return _collect(pipes, processes, timeout_seconds)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _store() -> Any:
    """Where the workers meet. As with a launcher's agent, it outlives every one of them."""
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _collect(
    pipes: list[Connection], processes: list[Any], timeout_seconds: float
) -> list[Outcome]:
    outcomes = [Outcome(rank) for rank in range(len(pipes))]
    start = time.monotonic()
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        left = timeout_seconds - (time.monotonic() - start)
        ready = wait(list(waiting), timeout=max(left, 0))
        if not ready:
            raise AssertionError(f"workers {sorted(waiting.values())} hang")
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                result, error, trace = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                outcomes[rank] = Outcome(rank, result, error, trace)
            except EOFError:
                outcomes[rank] = Outcome(rank, trace="ended without a word")
            outcomes[rank].seconds = time.monotonic() - start
    for process, outcome in zip(processes, outcomes, strict=True):
        process.join(10)
        outcome.exit_code = process.exitcode
    return outcomes


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_workers: int,
    port: int,
    pipe: Connection,
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_workers),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
    )
    result, error, trace = None, None, ""
    try:
        result = function(*args)
    except BaseException as problem:
        error, trace = problem, traceback.format_exc()
    # By plain pickle: multiprocessing's own way shares tensors, which end with this process.
    try:
        message = pickle.dumps((result, error, trace))
    except (pickle.PicklingError, TypeError):
        message = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    pipe.send_bytes(message)
    pipe.close()
