"""Which optimizer has which parameter; what would train unsynchronised is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from parallax.errors import ConfigError


def owners_of(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[int, tuple[Optimizer, dict[str, Any]]]:
    """Parameter → its optimizer and group; refuses what would train unsynchronised."""
    owners: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
    mine = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in mine:
                    raise ConfigError(
                        f"{type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the model's, so it would not be "
                        "kept the same on all workers. Make it part of the model (say "
                        "nn.ModuleList([model, criterion])), or take it out of the optimizer"
                    )
                if id(parameter) in owners:
                    raise ConfigError(f"parameter {mine[id(parameter)]!r} is in two optimizers")
                owners[id(parameter)] = (optimizer, group)
    _check_all_owned(model, owners)
    return owners


def _check_all_owned(model: nn.Module, owners: Mapping[int, object]) -> None:
    orphans = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in owners
    ]
    if orphans:
        shown = ", ".join(map(repr, orphans[:5])) + (", …" if len(orphans) > 5 else "")
        raise ConfigError(
            f"no optimizer given to parallelize() has {shown}. Pass all optimizers as a list, or "
            "freeze what is not trained with requires_grad_(False)"
        )


def check_arguments(model: object, optimizers: Sequence[object]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize() takes an nn.Module, not {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigError(
            "give parallelize() the model itself, not one wrapped for data parallelism"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"parallelize() takes torch optimizers, not {type(optimizer).__name__}")
