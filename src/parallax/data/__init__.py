"""`session.shard(loader)`: each worker's share of every global batch.

`batch` counts the samples of a batch, `splitting` divides a step, and `order` is what the workers
agree on once an epoch. `indexed` and `stream` read the batches, and `loader` is what the user
iterates. `usage` observes whether a loader's batches are trained on, `epochs` counts the script's
epochs, and `loaders` keeps all loaders of a session, with their positions.
"""

from parallax.data.batch import count, empty, take
from parallax.data.epochs import Epochs
from parallax.data.loader import ShardedLoader
from parallax.data.loaders import Loaders
from parallax.data.order import WorkerGroup
from parallax.data.usage import LoaderUsage

__all__ = [
    "Epochs",
    "LoaderUsage",
    "Loaders",
    "ShardedLoader",
    "WorkerGroup",
    "count",
    "empty",
    "take",
]
