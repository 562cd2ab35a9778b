"""DeepSpeed without ZeRO, as its guide to training has it: `initialize`, `backward`, `step`.

Tables are `nn.Embedding(sparse=True)`, whose gradients it reduces as rows and needs no setting for
(the flag `sparse_gradients` of former releases is gone); stages 1 to 3 of ZeRO know no sparse
gradients. Its mean over the workers, its precision and its buckets are the defaults.
"""

from __future__ import annotations

import os
from datetime import timedelta

# Or it chooses by what is installed.
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed

from benchmarks.engines.task import PATIENCE_SECONDS, Task, Trainer, loop


def start(task: Task) -> Trainer:
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    model = task.model(sparse=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=task.adagrad(model.parameters()), config=_config(task)
    )
    return loop(task, engine, engine.backward, engine.step, task.batches())


def _config(task: Task) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": task.workload.samples[0],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # By default it clips to 1, as no other engine does.
    }
