"""The same script under other launchers: each gives the result of one process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import parallax
from parallax.cluster.environment import slurm_port
from tests.support import started
from tests.support.namespaces import unshared
from tests.support.parity import assert_same
from tests.support.workers import free_port

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(Path(parallax.__file__).resolve().parents[1]), str(ROOT)]
SCRIPT = ["-m", "tests.support.started"]
LOOPBACK = "0100007F"
SECONDS = 240  # Ray takes 25 s alone, and 80 s where others keep the cores busy
LAUNCHERS = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "RAY")


def environ(**variables: str) -> dict[str, str]:
    """As from a plain shell, whatever started these tests."""
    clean = {name: v for name, v in os.environ.items() if not name.startswith(LAUNCHERS)}
    own = {"PYTHONPATH": os.pathsep.join(PATHS), "GLOO_SOCKET_IFNAME": "lo"}
    return {**clean, **own, "OMP_NUM_THREADS": "1", **variables}


def run_together(commands: Sequence[tuple[list[str], dict[str, str]]]) -> None:
    """Start each command with its variables; all must end well."""
    processes = [
        subprocess.Popen(
            command, env=environ(**own), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, own in commands
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            with process:  # closes its pipe, too
                process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs


def check_parity(directory: Path, num_workers: int) -> list[dict]:  # type: ignore[type-arg]
    """The workers' notes, if they trained together and exactly."""
    state, notes = started.found(directory, num_workers)
    assert_same(state, started.expected(), started.CASE.dtype)
    assert [note["num_workers"] for note in notes] == [num_workers] * num_workers
    assert {note["route"] for note in notes} == {"sharded"}
    return notes


def free_slurm_job() -> int:
    """The id of a job whose port is free."""
    while True:
        job = int(uuid.uuid4()) % 10**7
        if not _is_taken(slurm_port(job, 0)):
            return job


def _is_taken(port: int) -> bool:
    rows = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row.endswith(f":{port:04X}") for row in rows)


def test_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_together([([sys.executable, *torchrun, *SCRIPT, str(tmp_path)], {})])
    notes = check_parity(tmp_path, 2)
    assert [note["local_rank"] for note in notes] == [0, 1]
    assert [note["workers"] for note in notes] == [[[0, 1]]] * 2
    for note in notes:  # the store is torchrun's, not ours
        assert set(note["listens"].values()) <= {LOOPBACK}


def slurm(rank: int, num_workers: int, job: int, **others: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(num_workers),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "here",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        **others,
    }


def test_srun(tmp_path: Path) -> None:
    job = free_slurm_job()
    command = [sys.executable, *SCRIPT, str(tmp_path)]
    run_together([(command, slurm(rank, 2, job)) for rank in range(2)])
    notes = check_parity(tmp_path, 2)
    assert notes[0]["listens"][str(slurm_port(job, 0))] == LOOPBACK
    for note in notes:
        assert set(note["listens"].values()) == {LOOPBACK}


@pytest.mark.parametrize(("hosts", "by"), [("aabb", "torchrun"), ("abab", "srun")])
def test_two_hosts_with_two_workers_each(tmp_path: Path, hosts: str, by: str) -> None:
    """Contiguous and cyclic; LOCAL_RANK is not given, or Slurm's is."""
    prefix, port, job = unshared("uts"), str(free_port()), free_slurm_job()
    commands = []
    for rank, host in enumerate(hosts):
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if by == "srun":
            local = {"SLURM_LOCALID": str(hosts[:rank].count(host)), "SLURM_STEP_NUM_NODES": "2"}
            variables |= slurm(rank, 4, job, **local)
        else:
            variables |= {"RANK": str(rank), "WORLD_SIZE": "4"}
        commands.append(([*prefix, sys.executable, *SCRIPT, str(tmp_path), host], variables))
    run_together(commands)
    notes = check_parity(tmp_path, 4)
    assert [note["local_rank"] for note in notes] == [
        hosts[:r].count(h) for r, h in enumerate(hosts)
    ]
    expected = [[r for r, h in enumerate(hosts) if h == name] for name in "ab"]
    assert [note["workers"] for note in notes] == [expected] * 4
    assert [note["names"][note["index"]] for note in notes] == list(hosts)


# Ray


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path: Ray puts sockets there, whose names must not be longer than 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"
)
def test_ray_train(tmp_path: Path, temporary: Path) -> None:
    """In a network of its own: Ray and its workers' store listen on every interface."""
    mark = f"PARALLAX_TEST={uuid.uuid4()}"
    variables = {
        "HOME": str(temporary),
        "TMPDIR": str(temporary),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        **dict([mark.split("=")]),
    }
    script = ["-m", "tests.support.started_by_ray", str(tmp_path), str(temporary)]
    try:
        run_together([([*unshared("net"), sys.executable, *script], variables)])
        notes = check_parity(tmp_path, 2)
        assert [note["local_rank"] for note in notes] == [0, 1]
        assert [note["workers"] for note in notes] == [[[0, 1]]] * 2
        wait_until(lambda: not processes_with(mark), 20)
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)


def processes_with(variable: str) -> list[int]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:  # another user's, or gone
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)
