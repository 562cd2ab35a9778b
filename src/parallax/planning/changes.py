"""Decisions of the adaptive plan, as plain data. Every worker makes the same ones."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.planning.cost import Cluster
from parallax.planning.plan import Route


@dataclass(frozen=True)
class MoveTable:
    """Move a table to another route."""

    name: str
    route: Route
    why: str


@dataclass(frozen=True)
class MergeHosts:
    """Let the workers of a host pull and push together, or each one alone."""

    is_on: bool
    why: str


@dataclass(frozen=True)
class UseLinks:
    """Use newly measured links from now on."""

    cluster: Cluster
    why: str


@dataclass(frozen=True)
class TunePartitions:
    """Search for the number of partitions again: the workers' speed has changed."""


@dataclass(frozen=True)
class Notice:
    """Log an observation that changes nothing."""

    text: str


Change = MoveTable | MergeHosts | UseLinks | TunePartitions | Notice
