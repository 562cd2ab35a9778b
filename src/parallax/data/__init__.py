"""`session.shard(loader)`: each worker's share of every global batch.

`batch` knows how many samples a batch has, `cut` how a step is divided, `order` what the workers
agree on once an epoch, `indexed` and `stream` where the batches come from, and `loader` what the
user iterates.
"""

from parallax.data.batch import count, empty, take
from parallax.data.loader import ShardedLoader
from parallax.data.order import Agreement

__all__ = ["Agreement", "ShardedLoader", "count", "empty", "take"]
