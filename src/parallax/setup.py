"""Set up a training: join the workers, compare their models, place every parameter."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from parallax import checkpoint
from parallax.checkpoint.progress import Progress
from parallax.cluster.environment import Place, use_interface
from parallax.cluster.heartbeats import Heartbeats
from parallax.cluster.process_groups import ProcessGroups
from parallax.comm.compression import RowFormat
from parallax.comm.header import Layout
from parallax.comm.host_merge import MAX_KEYS, HostMerge
from parallax.comm.out_of_band import OutOfBandPulls
from parallax.comm.peers import HostGroups, Peers
from parallax.config import Config
from parallax.engine import placement
from parallax.engine.backward import REDUCTION
from parallax.engine.engine import Engine
from parallax.engine.guard import guard_copies
from parallax.engine.optimizer_hooks import OptimizerHooks
from parallax.engine.prefetcher import PREFETCH
from parallax.engine.row_optimizer import RowOptimizer
from parallax.engine.step import EARLY_UPDATE
from parallax.engine.table_set import TableSet
from parallax.engine.trained_model import TrainedModel
from parallax.observability.ledger import Ledger
from parallax.planning.adaptive_plan import AdaptivePlan
from parallax.planning.plan import Plan
from parallax.training import Training

_log = logging.getLogger("parallax")


@dataclass(frozen=True)
class _Workers:
    """This worker's connections to the others."""

    groups: ProcessGroups
    peers: Peers
    host_merge: HostMerge
    device: torch.device


def set_up(
    trained: TrainedModel, config: Config, place: Place, ledger: Ledger, resume_dir: str | None
) -> Training:
    """Join the other workers and place every parameter on its route. Collective.

    If it raises, everything that was made is undone, so that another training may begin.
    """
    with ExitStack() as made:
        workers = _join(trained, config, place, ledger, made)
        if workers.groups.store is not None:
            lines = _describe(trained, config, resume_dir)
            placement.compare(lines, workers.peers, workers.groups.store)
        return _assemble(trained, config, workers, resume_dir, made)


def _assemble(
    trained: TrainedModel,
    config: Config,
    workers: _Workers,
    resume_dir: str | None,
    made: ExitStack,
) -> Training:
    """Make the objects of a training and place the parameters. Collective."""
    peers, hosts, device = workers.peers, workers.groups.hosts, workers.device
    adaptive_plan = AdaptivePlan(
        trained.plan, config, peers, workers.host_merge, hosts, device, trained.movable(config)
    )
    made.callback(adaptive_plan.close)
    tables = TableSet(peers, trained.owners, device, trained.paddings, trained.row_rules)
    if peers.out_of_band is not None:
        peers.out_of_band.serve_from(tables)
    row_optimizers = {id(each): RowOptimizer(each, config.is_lazy) for each in trained.optimizers}
    state = checkpoint.TrainingState(
        trained.model, trained.optimizers, tables, row_optimizers.values(), peers
    )
    progress = Progress(config, resume_dir, peers, state)
    made.callback(progress.close)
    engine = Engine(
        trained,
        tables,
        row_optimizers,
        config,
        peers,
        workers.host_merge,
        adaptive_plan,
        progress,
        (workers.groups.dense, workers.groups.sums),
        device,
    )
    made.callback(engine.close)
    if peers.num_workers > 1:
        for guard in guard_copies(trained.model, set(tables.by_id), peers):
            made.callback(guard.remove)
    hooks = OptimizerHooks(trained, engine, adaptive_plan, progress)
    made.callback(hooks.remove)
    if peers.rank == 0:
        _log_plan(adaptive_plan.plan)
    return Training(
        hosts, device, peers, adaptive_plan, state, progress, engine, hooks, made.pop_all()
    )


# Workers ----------------------------------------------------------------------------------


def _join(
    trained: TrainedModel, config: Config, place: Place, ledger: Ledger, made: ExitStack
) -> _Workers:
    """Connect to the other workers. Collective."""
    given_device = _given_device(trained.model, config)
    groups = _make_groups(place, given_device, config)
    made.callback(groups.close)
    peers = _make_peers(groups, trained, config, place, ledger)
    made.callback(peers.close)
    host_merge = _make_host_merge(groups, peers, trained, config)
    return _Workers(groups, peers, host_merge, given_device or _default_device(place, groups))


def _make_groups(place: Place, device: torch.device | None, config: Config) -> ProcessGroups:
    """Make the process groups. Collective."""
    if place.num_workers > 1:
        use_interface(config.interface)
    groups = ProcessGroups(place, device, config.timeout_seconds)
    given, found = place.local_rank, groups.hosts.local_rank
    if given is not None and given != found:
        _log.info("worker %d: LOCAL_RANK is %d, on its host it is %d", place.rank, given, found)
    return groups


def _make_peers(
    groups: ProcessGroups, trained: TrainedModel, config: Config, place: Place, ledger: Ledger
) -> Peers:
    """Return the other workers, with a header that has room for this model."""
    heartbeats = out_of_band = None
    if groups.store is not None:
        out_of_band = OutOfBandPulls(groups.store, place.rank, config.timeout_seconds)
        heartbeats = Heartbeats(groups.store, place.rank, place.num_workers, out_of_band)
    names, num_tables = [fact.name for fact in trained.facts], len(trained.tables)
    return Peers(
        place.rank,
        place.num_workers,
        ledger=ledger,
        timeout_seconds=config.timeout_seconds,
        control=groups.control,
        rows=groups.rows,
        prefetch=groups.prefetch,
        prefetch_control=groups.prefetch_control,
        heartbeats=heartbeats,
        out_of_band=out_of_band,
        host=HostGroups(groups.hosts.workers[groups.hosts.index], *groups.host),
        layout=Layout(max_counts=max(1, num_tables), num_flags=2 * len(names) + num_tables + 2),
        subjects=[*names, REDUCTION, PREFETCH, EARLY_UPDATE, checkpoint.SAVING, checkpoint.LOADING],
        row_format=RowFormat(config.wire),
    )


def _make_host_merge(
    groups: ProcessGroups, peers: Peers, trained: TrainedModel, config: Config
) -> HostMerge:
    hosts = groups.hosts
    num_keys = sum(line.shape[0] for line in trained.tables)
    is_on = config.merge_hosts and hosts.are_shared and num_keys > 0
    if is_on and num_keys >= MAX_KEYS:
        _log.warning("tables of %d rows are too large for hosts to merge rows", num_keys)
        is_on = False
    return HostMerge(peers, hosts, is_on=is_on)


# Devices ----------------------------------------------------------------------------------


def _given_device(model: nn.Module, config: Config) -> torch.device | None:
    """Return the device that the script chose, if it did."""
    if config.device is not None:
        return torch.device(config.device)
    return next((p.device for p in model.parameters() if not p.is_meta), None)


def _default_device(place: Place, groups: ProcessGroups) -> torch.device:
    """Return this worker's GPU if every worker has one: all must exchange in the same way."""
    if groups.device_type != "cuda":
        return torch.device("cpu")
    if place.local_rank is None:
        place = replace(place, local_rank=groups.hosts.local_rank)
    return place.device


# The model --------------------------------------------------------------------------------


def _describe(trained: TrainedModel, config: Config, resume_dir: str | None) -> list[str]:
    """Return what must be the same on every worker, a line for each thing."""
    lines = trained.describe(config)
    saves = config.checkpoint_dir is not None or resume_dir is not None
    schedule = checkpoint.Schedule.of(config)
    lines.append(f"checkpoints {schedule}" if saves else "no checkpoints by themselves")
    lines.append("tables may move" if config.replan else "tables stay")
    lines.append(f"rows travel as {config.wire}")
    lines.append(f"{config.min_partitions} partitions at least")
    lines.append("hosts merge rows" if config.merge_hosts else "hosts do not merge rows")
    lines.append("a run's folder" if config.run_dir is not None else "no run's folder")
    for name, buffer in trained.model.named_buffers():
        lines.append(f"buffer {name!r} {tuple(buffer.shape)} {buffer.dtype}")
    return lines


def _log_plan(plan: Plan) -> None:
    _log.info("%s", plan)
    for hint in plan.hints():
        _log.warning("%s", hint)
