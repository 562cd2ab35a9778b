"""TorchRec on CPUs: sharded tables with a fused optimizer, and DDP for the layers.

As its documentation has it: tables on the meta device, a plan by `EmbeddingShardingPlanner`,
`DistributedModelParallel`, and `TrainPipelineSparseDist`, which exchanges the next batch's ids
while this one computes. What is not the default:

- The planner may use one kind of sharding only, the engine's option `sharding`. Left alone it takes
  tables for dlrm, and for lm columns, with more bytes and more time than rows.
- Bags of one id each (`EmbeddingBagCollection`, its choice where samples have an id of each table)
  if the sharding is by tables. By rows its sharder offers them on CUDA only, and a plan that has
  them on CPUs all the same sends five times the bytes of an `EmbeddingCollection` at 4 hosts.
- No `use_index_dedup`: its operator has no CPU kernel (`fbgemm::jagged_unique_indices`).
- Ids are spread over the rows as a hash would do, since shards by rows are consecutive ones and
  TorchRec takes a table's size for that of a hash. As they are, the first host has most of the
  frequent words.
- Ids are of 32 bits, as those of its Criteo reader.
- Adagrad's epsilon and start are those of torch; the fused one has no option for its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from benchmarks.engines.task import PATIENCE_SECONDS, Task, Trainer
from benchmarks.workloads import Table
from benchmarks.workloads.workload import POOL, TILE_ROWS

CPU, META = torch.device("cpu"), torch.device("meta")
TORCH_EPSILON = 1e-10


def start(task: Task) -> Trainer:
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    model = _distribute(task, Model(task))
    _set_start(task, model)
    layers = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(layers, task.adagrad)]
    )
    kind = TrainPipelineSparseDist if task.workload.tables else TrainPipelineBase
    pipeline = kind(model, optimizer, CPU)
    data = cycle(_pool(task))

    def turn(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = pipeline.progress(data)
        return float(loss)

    return turn


@dataclass
class Samples(Pipelineable):
    """A batch as TorchRec's pipelines take it; on a CPU there is nowhere to move it."""

    ids: KeyedJaggedTensor | None
    others: list[Tensor]

    def to(self, device: torch.device, non_blocking: bool) -> Samples:
        return self

    def record_stream(self, stream: torch.Stream) -> None: ...


class Model(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.is_pooled = _is_pooled(task)
        ids = task.workload.batch(0, 0).ids
        self.shapes = {
            table.name: (*of_table.shape, table.width)
            for table, of_table in zip(task.workload.tables, ids, strict=True)
        }
        if task.workload.tables:
            self.tables = _collection(task)
        self.layers = task.layers()

    def forward(self, samples: Samples) -> tuple[Tensor, Tensor]:
        loss = self.layers(self._rows(samples), samples.others)
        return loss, loss.detach()

    def _rows(self, samples: Samples) -> list[Tensor]:
        if not self.shapes:
            return []
        found = self.tables(samples.ids)
        if self.is_pooled:
            found = found.to_dict()
            return [found[name] for name in self.shapes]
        return [found[name].values().view(shape) for name, shape in self.shapes.items()]


def _is_pooled(task: Task) -> bool:
    """Whether bags are used: by tables, and samples have one id of each."""
    shapes = {ids.shape for ids in task.workload.batch(0, 0).ids}
    is_one_each = len(shapes) == 1 and len(shapes.pop()) == 1
    return is_one_each and task.options["sharding"] == "table_wise"


def _collection(task: Task) -> nn.Module:
    config = EmbeddingBagConfig if _is_pooled(task) else EmbeddingConfig
    configs = [
        config(
            name=table.name,
            num_embeddings=table.num_rows,
            embedding_dim=table.width,
            feature_names=[table.name],
        )
        for table in task.workload.tables
    ]
    if _is_pooled(task):
        return EmbeddingBagCollection(tables=configs, device=META)
    return EmbeddingCollection(tables=configs, device=META)


def _distribute(task: Task, model: Model) -> DistributedModelParallel:
    fused = {
        "optimizer": EmbOptimType.EXACT_ADAGRAD,
        "learning_rate": task.workload.learning_rate,
        "eps": TORCH_EPSILON,
    }
    kind = EmbeddingBagCollectionSharder if model.is_pooled else EmbeddingCollectionSharder
    constraint = ParameterConstraints(
        sharding_types=[task.options["sharding"]], compute_kernels=["fused"]
    )
    planner = EmbeddingShardingPlanner(constraints=dict.fromkeys(model.shapes, constraint))
    sharders: list[Any] = [kind(fused)]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def _set_start(task: Task, model: DistributedModelParallel) -> None:
    tables = {table.name: table for table in task.workload.tables}
    for name, weight in model.state_dict().items():
        if isinstance(weight, ShardedTensor):
            _set_rows(tables[name.split(".")[-2]], weight)
    for state in model.fused_optimizer.state_dict()["state"].values():
        for sums in state.values():
            for shard in sums.local_shards():
                shard.tensor.fill_(task.workload.accumulator)


def _set_rows(table: Table, weight: ShardedTensor) -> None:
    tile = table.start(0, TILE_ROWS)
    ids = np.argsort(_spread(table))
    for shard in weight.local_shards():
        (row, column), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        rows = tile[ids[row : row + height] % TILE_ROWS, column : column + width]
        shard.tensor.copy_(torch.from_numpy(rows))


def _spread(table: Table) -> np.ndarray:
    """The row of each id; another order for each table, or one host has all frequent ids."""
    return np.random.default_rng(list(table.name.encode())).permutation(table.num_rows)


def _pool(task: Task) -> list[Samples]:
    places = [torch.from_numpy(_spread(table)) for table in task.workload.tables]
    keys = [table.name for table in task.workload.tables]
    is_pooled = _is_pooled(task)
    return [
        Samples(_keyed(keys, places, ids, is_pooled) if keys else None, others)
        for ids, others in islice(task.batches(), POOL)
    ]


def _keyed(
    keys: list[str], places: list[Tensor], ids: list[Tensor], is_pooled: bool
) -> KeyedJaggedTensor:
    """A bag for each id; or one a table with all its ids, as tables differ in their number."""
    rows = [place[of_table.flatten()] for place, of_table in zip(places, ids, strict=True)]
    values = torch.cat(rows).int()
    lengths = [1] * len(values) if is_pooled else [len(of_table) for of_table in rows]
    return KeyedJaggedTensor(keys, values, lengths=torch.tensor(lengths, dtype=torch.int32)).sync()
