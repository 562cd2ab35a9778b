"""TensorFlow's ParameterServerStrategy, by the loop of its tutorial "Parameter server training".

Every host has a `worker` and a `ps` server, as in the Parallax paper; the first host's process is
the coordinator, which schedules steps on whichever worker is free. What the tutorial advises under
"Performance improvement" is done: `MinSizePartitioner` with its sizes shards variables; a constant
schedule and a legacy optimizer (of `tf_keras`, as Keras 3 has none) leave no variable that all
servers ask for; the vocabulary is shuffled, or the first server would have the frequent rows; and
the coordinator asks for several steps in one call, which saved some milliseconds of each.

Not as in the tutorial: an id that a batch repeats is looked up once (`tf.unique`), which is what
`tf.nn.embedding_lookup_sparse` does inside, and what sends less here. Training is asynchronous;
TensorFlow 2 has no other way. A turn of `n` steps is `n` steps for each worker, taken by whom is
free.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.workloads import Workload
from benchmarks.workloads.workload import NUM_PIECES, POOL

if TYPE_CHECKING:
    from benchmarks.engines.task import Task, Trainer

JOB_PORTS = {"chief": 0, "worker": 1000, "ps": 2000}
"""Beyond the master's."""
LOSS_PORT = 500
MIN_SHARD_BYTES = 256 << 10
"""The tutorial's."""
STEPS_A_CALL = 8
KEEP_ALIVE_SECONDS = 24 * 3600

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["GRPC_FAIL_FAST"] = "use_caller"  # The tutorial's: wait for servers that are not up yet.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def start(task: Task) -> Trainer:
    servers = [_popen_server(job, task.rank) for job in ("worker", "ps")]
    turn = _follow() if task.rank else _lead(task)
    turn.servers = servers  # type: ignore[attr-defined]  # They end with what holds their input.
    return turn


def _popen_server(job: str, rank: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.engines.tensorflow", job, str(rank)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def serve(job: str, rank: int) -> None:
    """Until the parent ends."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    # The tutorial's number for machines with fewer cores: a server of workers needs a few.
    config.inter_op_parallelism_threads = len(_hosts()) + 1
    server = tf.distribute.Server(_cluster(), job, rank, protocol="grpc", config=config)
    sys.stdin.read()
    del server


def _hosts() -> list[str]:
    return os.environ["BENCHMARK_HOSTS"].split(",")


def _cluster() -> Any:
    import tensorflow as tf

    hosts, port = _hosts(), int(os.environ["MASTER_PORT"])
    of_job = {"chief": hosts[:1], "worker": hosts, "ps": hosts}
    return tf.train.ClusterSpec(
        {
            # Ranks have ports of their own, as workers of one machine need.
            job: [f"{host}:{port + JOB_PORTS[job] + 10 * rank}" for rank, host in enumerate(names)]
            for job, names in of_job.items()
        }
    )


def _follow() -> Trainer:
    """The other hosts' processes wait for the coordinator, and learn the loss of it."""
    connection = _connect()
    return lambda num_steps: connection.recv()


def _loss_address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + LOSS_PORT


def _connect() -> Connection[Any, Any]:
    while True:
        try:
            return Client(_loss_address())
        except ConnectionRefusedError:  # It is not up yet.
            time.sleep(0.1)


def _lead(task: Task) -> Trainer:
    import tensorflow as tf
    from tensorflow.python.eager import context

    # Servers forget a coordinator that was silent for ten minutes, as between turns it may be.
    context._KEEP_ALIVE_SECS = KEEP_ALIVE_SECONDS
    listener = Listener(_loss_address(), backlog=task.num_workers)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(_cluster(), rpc_layer="grpc")
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        MIN_SHARD_BYTES, max_shards=task.num_workers
    )
    strategy = tf.distribute.ParameterServerStrategy(cluster, partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    orders = [_shuffled(table.num_rows) for table in task.workload.tables]
    steps = _steps(task, strategy, orders)
    batches = _batches(task, coordinator, orders)
    sleeps = _sleeps(task, coordinator)
    followers = [listener.accept() for _ in range(task.num_workers - 1)]

    def turn(num_steps: int) -> float:
        results = [
            coordinator.schedule(steps, args=(batches, sleeps, tf.constant(count)))
            for count in _calls(num_steps)
            for _ in range(task.num_workers)
        ]
        coordinator.join()
        loss = float(np.mean(coordinator.fetch(results[-task.num_workers :])))
        for follower in followers:
            follower.send(loss)
        return loss

    return turn


def _calls(num_steps: int) -> list[int]:
    """How many steps each of a worker's calls takes."""
    left = num_steps % STEPS_A_CALL
    return [STEPS_A_CALL] * (num_steps // STEPS_A_CALL) + [left] * (left > 0)


def _steps(task: Task, strategy: Any, orders: list[Any]) -> Any:
    """The model, its optimizer, and the function that workers run."""
    import tensorflow as tf

    from benchmarks.engines.tensorflow_layers import by_workload, emulated

    workload = task.workload
    with strategy.scope():
        tables = [_table(*pair) for pair in zip(workload.tables, orders, strict=True)]
        dense = {
            name: tf.Variable(parameter.detach().numpy(), name=name.replace(".", "_"))
            for name, parameter in _torch_layers(task).named_parameters()
        }
        optimizer = _adagrad(workload)
    variables = [part for variable in (*tables, *dense.values()) for part in _parts(variable)]

    def replica(ids: Any, others: Any, sleeps: Any) -> Any:
        layers = emulated(*sleeps) if task.is_emulated else by_workload(workload.name)
        with tf.GradientTape() as tape:
            rows = [_look_up(table, of_table) for table, of_table in zip(tables, ids, strict=True)]
            parameters = {name: tf.convert_to_tensor(value) for name, value in dense.items()}
            loss = layers(parameters, rows, others)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function
    def steps(iterator: Any, sleeps: Any, num_steps: Any) -> Any:
        loss = 0.0
        for _ in tf.range(num_steps):
            loss = strategy.run(replica, args=(*next(iterator), sleeps))
        return loss

    return steps


def _torch_layers(task: Task) -> Any:
    layers = task.layers()
    return layers.layers if task.is_emulated else layers


def _look_up(table: Any, ids: Any) -> Any:
    import tensorflow as tf

    distinct, places = tf.unique(tf.reshape(ids, [-1]))
    rows = tf.gather(tf.nn.embedding_lookup(table, distinct), places)
    return tf.reshape(rows, [*ids.shape, table.shape[1]])


def _table(table: Any, order: Any) -> Any:
    """Made shard by shard, as all of it at once may be more than a message can hold."""
    import tensorflow as tf

    shape = (table.num_rows, table.width)
    rows_of = np.argsort(order)

    def shard(partition_shape: Any = shape, partition_offset: Any = (0, 0)) -> Any:
        first = partition_offset[0]
        return tf.constant(table.start()[rows_of[first : first + partition_shape[0]]])

    return tf.Variable(shard, shape=shape, dtype=tf.float32, name=table.name)


def _parts(variable: Any) -> list[Any]:
    """A sharded variable's shards."""
    return list(getattr(variable, "variables", [variable]))


def _adagrad(workload: Workload) -> Any:
    workload.check_adagrad()
    from tf_keras.optimizers import legacy, schedules

    class Constant(schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> float:
            return workload.learning_rate

    # Torch's epsilon.
    return legacy.Adagrad(Constant(), workload.accumulator, epsilon=1e-10)


def _shuffled(num_rows: int) -> Any:
    return np.random.default_rng(0).permutation(num_rows)


def _batches(task: Task, coordinator: Any, orders: list[Any]) -> Any:
    """An iterator over each worker's own batches, made beforehand."""
    import tensorflow as tf

    pools = [_pool(task.workload, rank, orders) for rank in range(task.num_workers)]
    stacked = tf.nest.map_structure(lambda *arrays: tf.constant(np.stack(arrays)), *pools)

    def dataset() -> Any:
        rank = tf.distribute.coordinator.experimental_get_current_worker_index()
        mine = tf.nest.map_structure(lambda array: array[rank], stacked)
        return tf.data.Dataset.from_tensor_slices(mine).repeat().prefetch(1)

    return iter(coordinator.create_per_worker_dataset(dataset))


def _sleeps(task: Task, coordinator: Any) -> tuple[Any, ...]:
    """Each worker's iterators that sleep: for a piece of the forward, and of the backward."""
    from benchmarks.engines.tensorflow_layers import sleeping

    if not task.is_emulated:
        return ()
    piece = task.workload.compute_ms / 1000 / NUM_PIECES
    return tuple(
        iter(coordinator.create_per_worker_dataset(lambda part=part: sleeping(part * piece)))
        for part in (1 / 3, 2 / 3)
    )


def _pool(workload: Workload, rank: int, orders: list[Any]) -> tuple[Any, Any]:
    batches = [workload.batch(step, rank) for step in range(POOL)]
    ids = zip(*(batch.ids for batch in batches), strict=True)
    others = zip(*(batch.others for batch in batches), strict=True)
    return (
        tuple(order[np.stack(column)] for order, column in zip(orders, ids, strict=True)),
        tuple(np.stack(column) for column in others),
    )


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
