"""Which workers share a host, and the kind of device that all can use."""

from __future__ import annotations

import pytest
import torch

from parallax.cluster.environment import Place
from parallax.cluster.topology import Arrival, Hosts, common_device
from parallax.errors import ConfigError


def arrivals(*hosts: str) -> list[Arrival]:
    return [Arrival(f"{host} and more", host, "cpu", False) for host in hosts]


def devices(*told: tuple[str | None, bool]) -> list[Arrival]:
    return [Arrival("a", "a", device, has_gpu) for device, has_gpu in told]


@pytest.mark.parametrize(
    ("hosts", "workers"),
    [
        ("a", ((0,),)),
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("baab", ((0, 3), (1, 2))),
        ("aba", ((0, 2), (1,))),
        ("abc", ((0,), (1,), (2,))),
    ],
)
def test_workers_are_grouped_by_host_in_the_order_of_ranks(
    hosts: str, workers: tuple[tuple[int, ...], ...]
) -> None:
    for rank, host in enumerate(hosts):
        found = Hosts.of(arrivals(*hosts), rank)
        assert found.workers == workers
        assert found.workers[found.index][found.local_rank] == rank
        assert found.names[found.index] == host
        assert found.num_local_workers == hosts.count(host)
        assert len(found) == len(set(hosts))


def test_hosts_of_one_name_are_told_apart() -> None:
    told = [Arrival("localhost x", "localhost", None, False), *arrivals("localhost")]
    assert Hosts.of(told, 1).workers == ((0,), (1,))


def test_what_a_worker_tells_survives_json() -> None:
    mine = Arrival.here(torch.device("cpu"))
    assert Arrival.from_json(mine.to_json()) == mine
    assert mine.device == "cpu"
    assert Arrival.here(None).device is None


@pytest.mark.parametrize(
    ("told", "device"),
    [
        ([("cpu", False)] * 2, "cpu"),
        ([("cpu", True), ("cpu", False)], "cpu"),  # the models are where all can be
        ([("cuda", True)] * 3, "cuda"),
        ([(None, True)] * 2, "cuda"),
        ([(None, True), (None, False)], "cpu"),
        ([(None, True), ("cuda", True)], "cuda"),
        ([(None, True), ("cpu", True)], "cpu"),
        ([(None, False)], "cpu"),
    ],
)
def test_a_gpu_is_used_only_if_every_worker_has_one(
    told: list[tuple[str | None, bool]], device: str
) -> None:
    assert common_device(devices(*told)) == device


def test_models_on_different_kinds_of_devices_are_named() -> None:
    told = devices(("cuda", True), ("cpu", False), ("cpu", True))
    with pytest.raises(ConfigError) as caught:
        common_device(told)
    assert "cuda on worker 0; cpu on worker 1 and worker 2" in str(caught.value)
    assert "GPUs are seen by worker 0 and worker 2" in str(caught.value)
    with pytest.raises(ConfigError, match="worker 1 has none for its own.*model.cpu()"):
        common_device(devices(("cuda", True), (None, False)))


def test_the_gpu_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for num_gpus, local_rank, index in [(4, 3, 3), (2, 3, 1), (1, 3, 0), (4, None, 0)]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=num_gpus: n)
        assert Place(5, 8, local_rank).device == torch.device("cuda", index)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Place(5, 8, 3).device == torch.device("cpu")
