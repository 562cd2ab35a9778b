"""Clipping by the global norm, over dense gradients and those of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.comm.peers import Peers
from parallax.engine.sparse_table import norm_of_power, power_of
from parallax.tables.group import TableGroup


def clip_norm(
    dense: Sequence[Tensor],
    groups: Sequence[TableGroup],
    peers: Peers,
    max_norm: float,
    order: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before."""
    norm = _total_norm(dense, groups, peers, order)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to clip them all the same"
        )
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    rows = [found[1] for group in groups if (found := group.gradient) is not None]
    for gradient in [*dense, *rows]:
        gradient.mul_(coefficient.to(gradient.device))
    return norm


def _total_norm(
    dense: Sequence[Tensor], groups: Sequence[TableGroup], peers: Peers, order: float
) -> Tensor:
    rows = _rows_norm(groups, peers, order)
    if not dense:
        return rows.to(torch.get_default_dtype())
    whole = torch.nn.utils.get_total_norm(dense, order)
    total: Tensor = torch.linalg.vector_norm(torch.stack([whole, rows.to(whole)]), order)
    return total


def _rows_norm(groups: Sequence[TableGroup], peers: Peers, order: float) -> Tensor:
    """Over all owners' rows; each adds its own part, and one scalar travels."""
    infinite = order == float("inf")
    powers = torch.stack(
        [torch.zeros((), dtype=torch.float64), *(_power(group, order) for group in groups)]
    )
    power = powers.max() if infinite else powers.sum()
    if any(group.graded for group in groups):
        reduction = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        peers.total(power, reduction, f"the norm of the gradients in step {peers.step}")
    return norm_of_power(power, order)


def _power(group: TableGroup, order: float) -> Tensor:
    gradient = group.gradient
    return power_of(None if gradient is None else gradient[1], order)
