"""Where parameters lie at the start: the same model everywhere, rank 0's values, shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer

from parallax import init
from parallax.comm.peers import Peers
from parallax.config import Config, Initializer, first_match
from parallax.engine.sparse_table import SparseTable
from parallax.engine.table_set import TableSet
from parallax.errors import ConfigError, MismatchError
from parallax.planning.analysis import Facts, Kind
from parallax.planning.plan import Plan, Route
from parallax.tables.table import set_data

_BLOCK_ELEMENTS = 1 << 22
"""Start values are made in blocks, so that no temporary is as large as a shard."""


def compare(lines: Sequence[str], peers: Peers, store: Store) -> None:
    """See that all workers have the same description, and name the first line that differs."""
    text = json.dumps(lines)
    store.set(f"model/{peers.rank}", text)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    digests = [int(d) for d in peers.gather(torch.tensor([digest]), "comparing the models")]
    other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
    if other is not None:
        difference = _first_difference(store, other)
        # The store may live in one of these processes: nobody leaves before all have read it.
        peers.gather(torch.tensor([other]), "reporting that the models differ")
        raise MismatchError(difference)


def _first_difference(store: Store, other: int) -> str:
    ours, theirs = (json.loads(store.get(f"model/{rank}")) for rank in (0, other))
    for index in range(max(len(ours), len(theirs))):
        a, b = (lines[index] if index < len(lines) else "nothing" for lines in (ours, theirs))
        if a != b:
            return (
                f"the workers differ: worker 0 has {a}, but worker {other} has {b}. Build the same "
                "model and optimizer, with the same options, on every worker"
            )
    return f"the models of worker 0 and worker {other} differ"


def make_real(
    model: nn.Module,
    facts: Sequence[Facts],
    plan: Plan,
    device: torch.device,
    optimizers: Sequence[Optimizer],
) -> None:
    """Give parameters on the meta device memory and start values; tables get theirs by shard."""
    sharded = {id(f.parameter) for f in facts if plan[f.name].route is Route.SHARDED}
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and p.is_meta]
        dense = [p for p in own if id(p) not in sharded]
        buffers = [key for key, b in module._buffers.items() if b is not None and b.is_meta]
        if not dense and not buffers:
            continue
        if not hasattr(module, "reset_parameters") or len(dense) < len(own):
            raise ConfigError(
                f"module {name!r} ({type(module).__name__}) has parameters or buffers on the meta "
                "device, and no reset_parameters() to give them start values: build it on a "
                "real device"
            )
        for parameter in dense:
            set_data(parameter, torch.empty_like(parameter, device=device))
            _make_state_real(parameter, device, optimizers)
        for key in buffers:
            module._buffers[key] = torch.empty_like(module._buffers[key], device=device)
        module.reset_parameters()


def _make_state_real(
    parameter: nn.Parameter, device: torch.device, optimizers: Sequence[Optimizer]
) -> None:
    for optimizer in optimizers:
        start = optimizer.defaults.get("initial_accumulator_value", 0.0)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.is_meta:
                fresh = torch.full_like(value, start, device=device)
                optimizer.state[parameter][key] = fresh


def spread(facts: Sequence[Facts], plan: Plan, buffers: Sequence[Tensor], peers: Peers) -> None:
    """Rank 0's parameters and buffers to all; sharded ones go by `place_tables`."""
    if peers.num_workers == 1:
        return
    with torch.no_grad(), peers.waiting("giving out rank 0's parameters"):
        for fact in facts:
            if plan[fact.name].route is not Route.SHARDED:
                values = fact.parameter.detach().contiguous()
                peers.spread(values, 0)
                fact.parameter.copy_(values)
    if buffers:
        peers.spread_all(buffers, "giving out rank 0's buffers")


def place_tables(
    tables: TableSet,
    chosen: Sequence[SparseTable],
    facts: Mapping[str, Facts],
    config: Config,
    peers: Peers,
) -> None:
    """Keep only this owner's rows: rank 0's values, or start values if there are none."""
    groups = tables.shard(chosen)
    for group in groups:
        for number, parameter in enumerate(group.parameters):
            table = tables.by_id[id(parameter)]
            shard, values = group.shard(number), table.values("placement")
            if values.is_meta:
                _start(table, shard, facts[table.name], config, peers.rank)
            elif peers.num_workers == 1:
                shard.copy_(table.own_part(values))
            else:
                shard.copy_(_handed_out(table, values, peers))
    tables.enter(groups)


def _handed_out(table: SparseTable, values: Tensor, peers: Peers) -> Tensor:
    size = table.row_map.size_of(peers.rank)
    received = [size] + [0] * (peers.num_workers - 1)
    sent = [0] * peers.num_workers
    rows = values[:0]
    if peers.rank == 0:
        sent = [table.row_map.size_of(owner) for owner in range(peers.num_workers)]
        slots = torch.arange(table.row_map.num_rows, device=values.device)
        rows = values.index_select(0, table.row_map.ids(slots))
    with peers.waiting(f"giving out the rows of {table.name!r}"):
        return peers.exchange(rows.contiguous(), sent, received)


def _start(table: SparseTable, shard: Tensor, fact: Facts, config: Config, rank: int) -> None:
    """Fill a shard with start values."""
    parameter = table.parameter
    fill = _initializer(fact, config)
    ids = table.row_map.ids_of(rank, shard.device)
    row_shape = parameter.shape[1:]
    seed = int.from_bytes(hashlib.sha256(fact.name.encode()).digest()[:6], "big") + config.seed
    block = max(1, _BLOCK_ELEMENTS // max(1, row_shape.numel()))
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        shard[start : start + block] = fill(part, row_shape, parameter.dtype, seed)
    _zero_padding(shard, ids, fact)


def _initializer(fact: Facts, config: Config) -> Initializer:
    given = first_match(config.init, fact.name)
    if given is not None:
        return given
    if fact.kind is Kind.EMBEDDING:
        return init.normal()
    raise ConfigError(
        f"table {fact.name!r} is on the meta device, and only embedding modules have known start "
        f"values: say Config(init={{{fact.name!r}: parallax.init.normal(std=0.1)}}) or alike"
    )


def _zero_padding(shard: Tensor, ids: Tensor, fact: Facts) -> None:
    for padding in fact.padding_rows:
        shard[ids == padding] = 0
