"""Ray's way to start workers: `python -m tests.support.started_by_ray DIRECTORY TEMPORARY`."""

from __future__ import annotations

import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.support import started
from tests.support.namespaces import raise_loopback


def train(config: dict[str, str]) -> None:
    started.train(Path(config["directory"]))


def main(directory: str, temporary: str) -> None:
    raise_loopback()
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        _temp_dir=temporary,
        _node_ip_address="127.0.0.1",
    )
    TorchTrainer(
        train,
        train_loop_config={"directory": directory},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{temporary}/results"),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
