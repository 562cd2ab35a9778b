"""Workers that meet: hosts, devices and interfaces agreed, and who did not come."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest
import torch

from parallax.errors import ConfigError, WaitTimeoutError, WorkerLostError
from tests.support.models import Lookup, make_batches
from tests.support.parity import Case, assert_same, train_alone, train_together
from tests.support.started import listening_addresses
from tests.support.workers import free_port, outcomes_of, run_workers

SECONDS = 4.0
CASE = Case("embedding", num_steps=4)
LOOPBACK = "0100007F"


def start(on_meta: bool = False, **options: Any) -> Any:
    import parallax

    torch.manual_seed(0)
    with torch.device("meta" if on_meta else "cpu"):
        model = Lookup("embedding")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"timeout_seconds": SECONDS, **options}
    session = parallax.parallelize(model, optimizer, **options)
    model(make_batches(1)[0]).backward()
    optimizer.step()
    return session


def rank() -> int:
    return int(os.environ["RANK"])


# A group of the script's own


def own_group() -> tuple[Any, int, Any]:
    """As a script of old, or Ray, does: without LOCAL_RANK, and with another backend's name."""
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    with start() as session:
        hosts, local_rank = session.hosts, session.local_rank
    assert dist.is_initialized()
    state, _ = train_together(CASE)
    dist.destroy_process_group()
    return hosts, local_rank, state


def test_a_group_that_the_script_made_is_used() -> None:
    results = run_workers(own_group, 3)
    assert [local_rank for _, local_rank, _ in results] == [0, 1, 2]
    assert [hosts.workers for hosts, _, _ in results] == [((0, 1, 2),)] * 3
    assert_same(results[0][2], train_alone(CASE), CASE.dtype)


def wrong_local_rank() -> int:
    os.environ["LOCAL_RANK"] = "0"  # say, two torchruns on one host
    with start() as session:
        return int(session.local_rank)


def test_local_ranks_are_those_of_the_host_whatever_the_launcher_says() -> None:
    assert run_workers(wrong_local_rank, 2) == [0, 1]


# Devices


def some_on_a_gpu(chosen: list[str | None]) -> None:
    start(on_meta=True, device=chosen[rank()])


def test_models_on_different_devices_are_an_error_on_every_worker() -> None:
    """No GPU is needed for it: the workers agree before they touch their devices."""
    for outcome in outcomes_of(some_on_a_gpu, 3, ["cpu", "cuda", "cpu"]):
        assert isinstance(outcome.error, ConfigError), outcome.trace
        assert "cpu on worker 0 and worker 2; cuda on worker 1" in str(outcome.error)
        assert outcome.seconds < SECONDS


def test_a_gpu_that_another_worker_lacks_is_an_error_on_every_worker() -> None:
    for outcome in outcomes_of(some_on_a_gpu, 2, ["cuda", None]):
        assert isinstance(outcome.error, ConfigError), outcome.trace
        assert "worker 1 has none for its own" in str(outcome.error)


def one_sees_a_gpu() -> str:
    from parallax.cluster.topology import Arrival

    here = Arrival.here

    def with_gpu(device: torch.device | None) -> Arrival:
        mine = here(device)
        return Arrival(mine.host, mine.host_name, mine.device, has_gpu=rank() == 0)

    Arrival.here = with_gpu  # type: ignore[method-assign]
    import torch.distributed as dist

    with start(on_meta=True) as session:
        assert session.device == torch.device("cpu")
        return str(dist.get_backend())


def test_a_cluster_where_one_worker_has_a_gpu_trains_on_cpus() -> None:
    assert run_workers(one_sees_a_gpu, 2) == ["gloo", "gloo"]


# The interface


def by_interface(name: str) -> list[str]:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    with start(interface=name):
        return sorted(set(listening_addresses().values()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_listen_on_the_interface_that_is_named() -> None:
    assert run_workers(by_interface, 2, "lo")[1] == [LOOPBACK]


def test_an_interface_that_is_not_there_is_an_error() -> None:
    known = socket.if_nameindex()[0][1]
    for outcome in outcomes_of(by_interface, 2, "eth99"):
        assert isinstance(outcome.error, ConfigError), outcome.trace
        assert known in str(outcome.error)


# Who did not come


def absent(port: int) -> None:
    if rank() == 2:
        raise RuntimeError("the cause")
    as_srun(1234, port)
    start()


def as_srun(job: int, port: int, **others: str) -> None:
    variables = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": os.environ["WORLD_SIZE"],
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": os.environ["RANK"],
        "MASTER_PORT": str(port),
    }
    os.environ.update({**variables, **others})
    del os.environ["MASTER_ADDR"], os.environ["RANK"], os.environ["WORLD_SIZE"]


def test_a_worker_that_does_not_come_is_named() -> None:
    outcomes = outcomes_of(absent, 4, free_port())
    assert isinstance(outcomes[0].error, WaitTimeoutError), outcomes[0].trace
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        # Worker 0 has the store: the others' waits end with it, if not before.
        assert isinstance(outcome.error, WaitTimeoutError | WorkerLostError), outcome.trace
    assert "worker 0 of 4 waited 4 s in vain for worker 2" in str(outcomes[0].error)


def first_absent(port: int) -> None:
    if rank() == 0:
        raise RuntimeError("the cause")
    as_srun(1234, port)
    start()


def test_a_first_worker_that_does_not_come_is_named() -> None:
    error = outcomes_of(first_absent, 2, free_port())[1].error
    assert isinstance(error, WaitTimeoutError)
    assert "worker 1 did not reach worker 0 at 127.0.0.1:" in str(error)


def taken_port(port: int) -> None:
    as_srun(1234, port)
    start()


def test_a_port_that_another_job_has_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        outcomes = outcomes_of(taken_port, 2, other.getsockname()[1])
    assert isinstance(outcomes[0].error, ConfigError), outcomes[0].trace
    assert "MASTER_PORT to a port that is free" in str(outcomes[0].error)
    assert isinstance(outcomes[1].error, WaitTimeoutError), outcomes[1].trace


def several_hosts(port: int) -> None:
    as_srun(1234, port, SLURM_STEP_NUM_NODES="2")
    start()


def test_a_host_that_knows_itself_by_loopback_only_is_told() -> None:
    error = outcomes_of(several_hosts, 2, free_port())[0].error
    assert isinstance(error, ConfigError)
    assert "cannot reach it: set MASTER_ADDR" in str(error)


def two_jobs_at_one_port(port: int) -> int:
    """Workers 0 and 1 are one job; worker 2 is of another, whose first worker got no port."""
    job = rank() // 2
    os.environ.update(RANK=str([0, 1, 1][rank()]), WORLD_SIZE="2")
    as_srun(job, port)
    with start() as session:
        return int(session.num_workers)


def test_jobs_that_meet_at_one_port_do_not_mix() -> None:
    outcomes = outcomes_of(two_jobs_at_one_port, 3, free_port())
    assert [outcome.result for outcome in outcomes[:2]] == [2, 2]
    assert isinstance(outcomes[2].error, WaitTimeoutError | WorkerLostError), outcomes[2].trace
