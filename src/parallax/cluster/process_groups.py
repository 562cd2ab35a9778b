"""The process groups of a session. No other module makes any."""

from __future__ import annotations

import atexit
import ipaddress
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from parallax.cluster.environment import Meeting, Place
from parallax.cluster.topology import Arrival, Hosts, common_device
from parallax.errors import ConfigError, PeerError, WaitTimeoutError, WorkerLostError

_PART_SECONDS = 3.0

_num_sessions = 0
"""Number of sessions in this process so far: each has its own keys in the store."""
_stores: dict[Meeting, Store] = {}
"""Kept until the process ends: other workers may need them after its last session."""


class ProcessGroups:
    """The process groups of a session; none with one worker.

    Workers first connect to a store and agree there on the type of device, so that all make the
    same groups: NCCL needs a GPU on every worker, and a worker with another group would wait for
    ever.
    """

    def __init__(self, place: Place, device: torch.device | None, timeout_seconds: float) -> None:
        """Connect to the other workers. Collective.

        `device` holds this worker's model; None: any that all workers can use.
        """
        global _num_sessions
        _num_sessions += 1
        self.control: dist.ProcessGroup | None = None
        self.rows: dist.ProcessGroup | None = None
        self.dense: dist.ProcessGroup | None = None
        self.sums: dist.ProcessGroup | None = None
        """For sums of small dense gradients. See [Note: direct] in comm/direct.py."""
        self.prefetch: dist.ProcessGroup | None = None
        self.prefetch_control: dist.ProcessGroup | None = None
        self.host: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
        """Groups of this worker's host: for small CPU tensors, and for rows."""
        self.store: Store | None = None
        self._place = place
        self._timeout = timedelta(seconds=timeout_seconds)
        arrivals = [Arrival.here(device)]
        if place.num_workers > 1:
            base = self._base_store()
            with self._store_needed():
                # Its own connection, because the training thread may be blocked in the other one.
                own = base.clone() if hasattr(base, "clone") else base
                self.store = PrefixStore(f"parallax/{_num_sessions}", own)
                arrivals = self._gathered(self.store, arrivals[0])
        self.hosts = Hosts.of(arrivals, place.rank)
        self.device_type = self._agreed(arrivals)
        if place.num_workers > 1:
            try:
                self._make(base)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        dense, prefetch = (self.dense, self.sums), (self.prefetch, self.prefetch_control)
        for group in (self.control, self.rows, *dense, *prefetch, *self.host):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    # Meeting ------------------------------------------------------------------------------

    def _base_store(self) -> Store:
        place, timeout = self._place, self._timeout
        if dist.is_initialized():
            default: Store = dist.distributed_c10d._get_default_store()
            return default
        if place.meeting is not None:
            return _own_store(place.meeting, place.rank, place.num_workers, timeout)
        try:
            found = next(rendezvous("env://", place.rank, place.num_workers, timeout=timeout))
        except RuntimeError as error:
            raise WaitTimeoutError(
                f"{self._me} did not find all others in {timeout.total_seconds():g} s: some did "
                "not reach parallelize(); see their errors"
            ) from error
        store: Store = found[0]
        store.set_timeout(timeout)
        return store

    def _gathered(self, store: Store, mine: Arrival) -> list[Arrival]:
        """Exchange arrivals; return those of all workers, by rank."""
        keys = [f"arrival/{rank}" for rank in range(self._place.num_workers)]
        store.set(keys[self._place.rank], mine.to_json())
        self._await(store, keys)
        found = [Arrival.from_json(text) for text in store.multi_get(keys)]
        store.set(f"seen/{self._place.rank}", "")
        return found

    @contextmanager
    def _store_needed(self) -> Iterator[None]:
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as error:
            raise WorkerLostError(
                f"{self._me} lost the store where the workers meet: worker 0, or the launcher that "
                "has it, ended"
            ) from error

    def _await(self, store: Store, keys: list[str]) -> None:
        try:
            store.wait(keys, self._timeout)
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise WaitTimeoutError(
                f"{self._me} waited {self._timeout.total_seconds():g} s in vain for "
                f"{' and '.join(f'worker {rank}' for rank in absent)} to reach parallelize(); see "
                "their errors, or raise Config.timeout_seconds"
            ) from error

    def _agreed(self, arrivals: Sequence[Arrival]) -> str:
        try:
            return common_device(arrivals)
        except ConfigError:
            if self.store is not None:
                # One of these processes may host the store: none exits before all have read it.
                seen = [f"seen/{rank}" for rank in range(self._place.num_workers)]
                with suppress(RuntimeError):
                    self.store.wait(seen, self._timeout)
            raise

    # Making -------------------------------------------------------------------------------

    def _make(self, base: Store) -> None:
        backend = "nccl" if self.device_type == "cuda" else "gloo"
        if not dist.is_initialized():
            both = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
            try:
                dist.init_process_group(
                    both,
                    store=PrefixStore(f"default/{_num_sessions}", base),
                    rank=self._place.rank,
                    world_size=self._place.num_workers,
                    timeout=self._timeout,
                )
            except RuntimeError as error:
                raise WorkerLostError(f"{self._me} could not join the others: {error}") from error
            atexit.register(_leave)
        self.control = dist.new_group(backend="gloo", timeout=self._timeout)
        self.rows = dist.new_group(backend=backend, timeout=self._timeout)
        self.dense = dist.new_group(backend=backend, timeout=self._timeout)
        if backend == "gloo" and self._place.num_workers > 2:
            self.sums = dist.new_group(backend="gloo", timeout=self._timeout)
        self.prefetch = dist.new_group(backend=backend, timeout=self._timeout)
        self.prefetch_control = dist.new_group(backend="gloo", timeout=self._timeout)
        if self.hosts.are_shared:
            # Every worker takes part in making the groups of every host.
            pairs = [self._host_groups(ranks, backend) for ranks in self.hosts.workers]
            self.host = pairs[self.hosts.index]

    def _host_groups(
        self, ranks: Sequence[int], backend: str
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        control, rows = (
            dist.new_group(list(ranks), backend=each, timeout=self._timeout)
            for each in ("gloo", backend)
        )
        is_mine = self._place.rank in ranks
        return (control, rows) if is_mine else (None, None)

    @property
    def _me(self) -> str:
        return f"worker {self._place.rank} of {self._place.num_workers}"


def _own_store(meeting: Meeting, rank: int, num_workers: int, timeout: timedelta) -> Store:
    """Return the store of workers that no launcher connects; worker 0 hosts it."""
    if meeting not in _stores:
        try:
            store = _hosted(meeting, timeout) if rank == 0 else _joined(meeting, timeout)
            _stores[meeting] = store
            atexit.register(_part, PrefixStore(meeting.name, store), rank, num_workers)
        except RuntimeError as error:
            raise WaitTimeoutError(
                f"worker {rank} did not reach worker 0 at {meeting.address}:{meeting.port} in "
                f"{timeout.total_seconds():g} s: see whether it has reached parallelize(); if this "
                "address or port is not for workers, set MASTER_ADDR and MASTER_PORT"
            ) from error
    return PrefixStore(meeting.name, _stores[meeting])


def _hosted(meeting: Meeting, timeout: timedelta) -> TCPStore:
    # torch would listen on every interface, so the store is given a socket.
    listener = _listener(meeting)
    return TCPStore(
        listener.getsockname()[0],
        meeting.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _joined(meeting: Meeting, timeout: timedelta) -> TCPStore:
    """Connect in a thread: torch waits for ever for the answer of a port that is not a store's."""
    found: list[TCPStore | RuntimeError] = []

    def join() -> None:
        try:
            store = TCPStore(meeting.address, meeting.port, wait_for_workers=False, timeout=timeout)
            found.append(store)
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=join, name="parallax-meeting", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    result = found[0] if found else RuntimeError("no answer")
    if isinstance(result, RuntimeError):
        raise result
    return result


def _listener(meeting: Meeting) -> socket.socket:
    where = f"{meeting.address}:{meeting.port}"
    try:
        found = socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        if meeting.remote and ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"{meeting.address} is {address[0]} on that host itself, where workers of other "
                "hosts cannot reach it: set MASTER_ADDR to its address in the network, and "
                "Config.interface or GLOO_SOCKET_IFNAME to the interface that has it"
            )
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"worker 0 cannot listen on {where} ({error}): set MASTER_ADDR to an address of its "
            "host, or MASTER_PORT to a port that is free there, the same for all workers"
        ) from error


def _part(store: Store, rank: int, num_workers: int) -> None:
    """Leave the store at the end of the process; worker 0, which hosts it, leaves last.

    After a failure the others may still have to read there which worker failed. A worker that was
    killed never leaves, so the wait is short.
    """
    with suppress(RuntimeError):
        store.set(f"left/{rank}", "")
        if rank == 0:
            left = [f"left/{each}" for each in range(num_workers)]
            store.wait(left, timedelta(seconds=_PART_SECONDS))


def _leave() -> None:
    """Destroy the default group at the end of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
