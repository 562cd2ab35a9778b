"""Decide whether the workers of a host pull and push together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from parallax.comm.peers import Peers
from parallax.observability.ledger import Entry
from parallax.planning.changes import Change, MergeHosts
from parallax.planning.cost import ID_BYTES, Cluster
from parallax.planning.plan import Plan, Route
from parallax.planning.planner import better_alone


class HostMerging:
    """Compares the bytes that workers want with the bytes that their host asks for."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._counted: dict[str, Tensor] = {}
        """By parameter: the ledger's rows at the last count."""
        self._merged_bytes: tuple[float, float, float] | None = None
        """Bytes of a step when host merging was last on: wanted, wanted without compression,
        asked for."""

    def count(self, plan: Plan, new_routes: Mapping[str, Route]) -> Tensor:
        """Return this worker's bytes since the last count: wanted, wanted without compression,
        asked for. `new_routes` are those of tables that are about to move."""
        moved = torch.zeros(3, dtype=torch.float64)
        for line in plan.parameters:
            total = self._peers.ledger.totals.get(line.name, Entry())
            now = torch.tensor([total.rows, total.rows, total.asked_rows], dtype=torch.float64)
            rows = now - self._counted.get(line.name, torch.zeros_like(now))
            self._counted[line.name] = now
            if new_routes.get(line.name, line.route) is Route.SHARDED:
                sizes = [line.row_bytes, line.exact_row_bytes, line.row_bytes]
                moved += 2 * rows * (torch.tensor(sizes, dtype=torch.float64) + ID_BYTES)
        return moved

    def switch_off(self, bytes_per_step: Tensor, cluster: Cluster | None) -> list[Change]:
        """Switch host merging off if workers of a host share too few rows. Collective."""
        where = f"looking at what hosts share in step {self._peers.step}"
        wanted, exact, asked = (
            torch.stack(self._peers.gather(bytes_per_step, where)).mean(0).tolist()
        )
        self._merged_bytes = (wanted, exact, asked)
        why = better_alone(wanted, exact, asked, cluster)
        return [] if why is None else [MergeHosts(False, why)]

    def switch_on(self, cluster: Cluster, why: str) -> list[Change]:
        """Switch host merging on again if it pays with these new links."""
        if self._merged_bytes is None or better_alone(*self._merged_bytes, cluster) is not None:
            return []
        return [MergeHosts(True, why)]
