"""Who runs where: torchrun's variables, Slurm's, none; and the network interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from parallax.cluster import environment
from parallax.cluster.environment import (
    Meeting,
    Place,
    find_place,
    first_host,
    slurm_port,
    use_interface,
)
from parallax.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1234",
}
# What `sbatch --ntasks 4` gives to its script.
SBATCH = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
# What srun adds for the third of four tasks, dealt out in turn.
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("SLURM") or name in TORCHRUN or name in environment._INTERFACES:
            monkeypatch.delenv(name)
    yield
    use_interface(None)


def give(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_nothing_given_is_one_worker() -> None:
    assert find_place() == Place(0, 1)


def test_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, TORCHRUN)
    assert find_place() == Place(3, 4, 1)
    monkeypatch.delenv("LOCAL_RANK")
    assert find_place() == Place(3, 4, None)


def test_one_worker_needs_no_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1"})
    assert find_place() == Place(0, 1)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({**TORCHRUN, "RANK": "4"}, r"RANK is 4, but must lie between 0 and WORLD_SIZE - 1 = 3"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is -1"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2.*LOCAL_WORLD_SIZE - 1 = 1"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', not a number"),
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE is 4, but there is no RANK"),
        (without(TORCHRUN, "MASTER_ADDR"), "but not MASTER_ADDR, where the workers meet"),
        (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), "not MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_what_does_not_fit_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    give(monkeypatch, variables)
    with pytest.raises(ConfigError, match=f"(?s){says}.*`parallax run`, torchrun, srun"):
        find_place()


# Slurm


def test_sruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, SRUN)
    meeting = Meeting("node07", slurm_port(71, 2), "slurm/71.2", remote=True)
    assert find_place() == Place(2, 4, 1, meeting)


def test_tasks_of_one_host_meet_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, {**SRUN, "SLURM_STEP_NUM_NODES": "1"})
    meeting = find_place().meeting
    assert meeting is not None
    assert (meeting.address, meeting.remote) == ("127.0.0.1", False)


def test_the_users_variables_win_over_sruns(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, {**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "999", "WORLD_SIZE": "4"})
    assert find_place().meeting == Meeting("10.0.0.7", 999, "slurm/71.2")
    give(monkeypatch, TORCHRUN)
    assert find_place() == Place(3, 4, 1)


@pytest.mark.parametrize(
    "variables",
    [
        SBATCH,
        without(SBATCH, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),  # a shell of salloc
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**SRUN, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc's interactive step
        without(SRUN, "SLURM_PROCID"),
    ],
)
def test_a_plain_python_in_a_slurm_job_is_one_worker(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    give(monkeypatch, variables)
    assert find_place() == Place()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({**SRUN, "SLURM_PROCID": "4"}, "SLURM_PROCID is 4.*SLURM_STEP_NUM_TASKS - 1 = 3"),
        ({**SRUN, "WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but srun started 4 tasks"),
        (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set"),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "set MASTER_ADDR"),
        ({**SRUN, "SLURM_STEP_NODELIST": "node[1-"}, r"'node\[1-', which cannot be read"),
        ({**SRUN, "MASTER_PORT": "x"}, "MASTER_PORT is 'x', not a number"),
    ],
)
def test_sruns_variables_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    give(monkeypatch, variables)
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        find_place()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("node[01-04,7],gpu-[1,3]x", "node01"),
        ("gpu-[1,3]x,node[01-04]", "gpu-1x"),
        ("n-1.example.org,n-2", "n-1.example.org"),
        ("rack[2-3]node[008-015]", "rack2node008"),
        ("node[12]", "node12"),
    ],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_jobs_and_steps_nearby_have_ports_of_their_own() -> None:
    ports = [slurm_port(job, step) for job in range(70000, 70100) for step in range(97)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 1024
    assert max(ports) < 32768


# The network interface


def test_the_interface_is_given_to_both_backends() -> None:
    name = socket.if_nameindex()[0][1]
    use_interface(name)
    assert os.environ["GLOO_SOCKET_IFNAME"] == name
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={name}"
    use_interface(None)
    assert not set(environment._INTERFACES) & set(os.environ)


def test_interface_variables_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    name = socket.if_nameindex()[0][1]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    use_interface(name)
    assert os.environ["GLOO_SOCKET_IFNAME"] == name
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    use_interface("absent here, but nobody asks for it")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_what_the_launcher_chose_by_itself_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    name = socket.if_nameindex()[0][1]
    monkeypatch.setenv("PARALLAX_INTERFACE", "eth7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    use_interface(name)
    assert os.environ["GLOO_SOCKET_IFNAME"] == name
    use_interface(None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    name = socket.if_nameindex()[0][1]
    with pytest.raises(ConfigError, match=rf"'eth99', but this host \(.*\) has .*{name}"):
        use_interface("eth99")
