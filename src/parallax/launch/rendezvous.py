"""The meeting point of a job whose workers are all on this machine."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

ADDRESS = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """One agent, and one store that only this machine can reach.

    torch's own rendezvous listens on every interface, whatever address it is given, and unpickles
    what it finds in its store: anyone on the network could run code in the agent. It also has
    nothing to agree on when there is one agent only.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._is_closed = False
        # The store takes the listening socket over, so the port is never free in between.
        listener = socket.create_server((ADDRESS, 0), backlog=1024)
        self._port: int = listener.getsockname()[1]
        self._store = TCPStore(
            ADDRESS,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return "parallax-loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        info = RendezvousStoreInfo(master_addr=ADDRESS, master_port=self._port)
        return RendezvousInfo(self._store, 0, 1, info)

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._is_closed = True
        return True
