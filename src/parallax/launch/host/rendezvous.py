"""The meeting point of the agents: torch's c10d rendezvous, on the one address that was asked for.

[Note: rendezvous]
torch's own way to make it listens on every interface, whatever address it is given, and unpickles
what it finds there: anyone on the network could run code in an agent. So the store's socket is
bound here, and the state that the agents exchange is signed with a secret of the job.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from parallax.launch.job import AgentSpec

BACKEND = "parallax-c10d"

_TAG_BYTES = hashlib.sha256().digest_size
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class SignedBackend(C10dRendezvousBackend):
    """Holds the agents' state in the store, and takes none that the job's secret did not sign."""

    def __init__(self, store: TCPStore, run_id: str, secret: bytes) -> None:
        super().__init__(store, run_id)
        self._secret = secret

    def get_state(self) -> tuple[bytes, object] | None:
        found = super().get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    def set_state(
        self, state: bytes, token: object | None = None
    ) -> tuple[bytes, object, bool] | None:
        found = super().set_state(self._tag(state) + state, token)
        return None if found is None else (self._checked(found[0]), found[1], found[2])

    def _tag(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, state, "sha256")

    def _checked(self, signed: bytes) -> bytes:
        tag, state = signed[:_TAG_BYTES], signed[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(state)):
            raise RendezvousStateError("what lies at the meeting point is not of this job")
        return state


class HostsRendezvous(RendezvousHandler):
    """torch's rendezvous of a fixed set of hosts, whose order is that of the hosts file.

    The workers use the same store.
    """

    def __init__(self, spec: AgentSpec, parameters: RendezvousParameters) -> None:
        self._spec = spec
        # The store takes the listening socket over, so the port is never free in between.
        listening = {} if spec.listen_fd is None else {"master_listen_fd": spec.listen_fd}
        store = TCPStore(
            spec.address,
            spec.port,
            is_master=spec.listen_fd is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=spec.start_seconds),
            **listening,  # type: ignore[arg-type]
        )
        backend = SignedBackend(store, parameters.run_id, bytes.fromhex(spec.secret))
        self._inner = create_handler(store, backend, parameters)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        # Else torch would open one more store for the workers, on every interface.
        os.environ[_OWN_STORE] = "1"
        try:
            met = self._inner.next_rendezvous()
        finally:
            del os.environ[_OWN_STORE]
        info = RendezvousStoreInfo(master_addr=self._spec.address, master_port=self._spec.port)
        return RendezvousInfo(met.store, self._spec.host_index, met.world_size, info)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()
