"""`session.shard(loader)`: each worker's share of every global batch.

`batch` knows how many samples a batch has, `cut` how a step is divided, `order` what the workers
agree on once an epoch, `indexed` and `stream` where the batches come from, and `loader` what the
user iterates. `feed` sees whether a loader's batches are trained on, `epochs` counts the script's
epochs, and `loaders` keeps all loaders of a session, with their places.
"""

from parallax.data.batch import count, empty, take
from parallax.data.epochs import Epochs
from parallax.data.feed import Feed
from parallax.data.loader import ShardedLoader
from parallax.data.loaders import Loaders
from parallax.data.order import Agreement

__all__ = ["Agreement", "Epochs", "Feed", "Loaders", "ShardedLoader", "count", "empty", "take"]
