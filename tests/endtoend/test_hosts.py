"""`parallax run --hosts` on several hosts: real network namespaces, real sshd, real kills."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import parallax
from benchmarks.testbed import Testbed

pytestmark = [
    pytest.mark.timeout(170),
    pytest.mark.skipif(
        Testbed.missing() is not None, reason=f"no test bed here: {Testbed.missing()}"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = str(Path(parallax.__file__).resolve().parents[1])
COMMAND = [sys.executable, "-m", "parallax.launch.command"]
# From a reason to end until nothing of the job is left anywhere: 10 s are promised, and the rest is
# for a machine so busy that this process looks late.
END_SECONDS = 10.0 + 5.0
FAILURE_SECONDS = 60.0
HOSTS = ["a", "b", "c", "d"]
LOCKED, SILENT = "locked", "silent"
"""Hosts that ask for a password, and that have no sshd."""
SLEEP = "import time\nprint('started', flush=True)\ntime.sleep(600)\n"

# Trains on as many samples as it is told to, once, and notes which samples each step took. After
# the step that is the gate it waits for the blow.
TRAIN = """
import json, os, socket, sys, time, uuid
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import parallax

num_samples, gate = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(num_samples, 8), nn.Linear(8, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
session = parallax.parallelize(model, optimizer, checkpoint_steps=5, timeout_seconds=30)
samples = TensorDataset(torch.arange(num_samples))
loader = session.shard(DataLoader(samples, batch_size=2, shuffle=True))
note = open(f"notes/{socket.gethostname()}-{uuid.uuid4().hex}", "w", buffering=1)
print("begins at step", session.step, "with", session.num_workers, "workers")
note.write(json.dumps({"begin": session.step, "workers": session.num_workers}) + "\\n")
for epoch in session.epochs(1):
    for (ids,) in loader:
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note.write(json.dumps({"step": session.step, "ids": ids.tolist()}) + "\\n")
        while session.step == gate and not os.path.exists("struck"):
            time.sleep(0.01)
        time.sleep(0.02)
note.write(json.dumps({"end": session.step}) + "\\n")
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    names, ssh = [*HOSTS, LOCKED, SILENT], {LOCKED: "password", SILENT: "off"}
    ssh = {name: ssh.get(name, "key") for name in names}
    with Testbed(len(names), names=names, ssh=ssh) as bed:
        yield bed


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass
class Cluster:
    """The hosts of the bed, and a directory that they share."""

    bed: Testbed
    path: Path
    hosts: list[str] = field(default_factory=lambda: HOSTS)

    def write(self, name: str, text: str) -> str:
        (self.path / name).write_text(textwrap.dedent(text))
        return name

    def hosts_file(self, **values: object) -> str:
        """A TOML file with the same for every host; `environment` is added to."""
        own = dict(values.pop("environment", {}))  # type: ignore[call-overload]
        environment = {"PYTHONPATH": SOURCE, "TMPDIR": str(self.path / "tmp"), **own}
        lines = [f"environment = {_inline(environment)}", f"python = {json.dumps(sys.executable)}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        (self.path / "tmp").mkdir(exist_ok=True)
        text = "[defaults]\n" + "\n".join(lines) + "\n"
        text += "".join(f'\n[[hosts]]\nhost = "{name}"\n' for name in self.hosts)
        return self.write("hosts.toml", text)

    def command(self, *arguments: str) -> list[str]:
        return [*COMMAND, "run", "--ssh-config", str(self.bed.ssh_config), *arguments]

    def environ(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": SOURCE, "NO_COLOR": "1"}

    @contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        process = self.bed.popen(
            self.command(*arguments),
            cwd=self.path,
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def run(self, *arguments: str, timeout: float = 100.0) -> Ended:
        begin = time.monotonic()
        with self.start(*arguments) as process:
            stdout, stderr = process.communicate(timeout=timeout)
        return Ended(process.returncode, stdout, stderr, time.monotonic() - begin)

    def check(self, *arguments: str) -> Ended:
        """`parallax check`, with a cache of its own."""
        command = [*COMMAND, "check", "--ssh-config", str(self.bed.ssh_config), *arguments]
        environ = {**self.environ(), "XDG_CACHE_HOME": str(self.path / "cache")}
        begin = time.monotonic()
        done = self.bed.run(command, cwd=self.path, env=environ)
        return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)

    def processes(self, host: str, pattern: str = "") -> list[int]:
        """Of the job on a host; those whose arguments match."""
        found = self.bed.processes(host)
        return [pid for pid, argv in found if re.search(pattern, " ".join(argv))]

    def wait_until_empty(self, seconds: float) -> None:
        wait_until(lambda: not any(self.processes(name) for name in HOSTS), seconds)
        assert not list((self.path / "tmp").glob("parallax-*"))

    def strike(self, blow: Blow, host: str) -> None:
        blow(self, host)
        (self.path / "struck").touch()

    def notes(self) -> list[list[dict]]:
        """What each worker of each attempt has written down so far."""
        texts = [file.read_text() for file in (self.path / "notes").iterdir()]
        return [[json.loads(line) for line in text.splitlines()] for text in texts if text]

    def attempts(self) -> dict[int, list[list[dict]]]:
        """The notes of each attempt, by the step from which it began."""
        found: dict[int, list[list[dict]]] = {}
        for note in sorted(self.notes(), key=lambda note: note[0]["begin"]):
            found.setdefault(note[0]["begin"], []).append(note)
        return found

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            last = [note[-1].get("step", 0) for note in self.notes() if note]
            return len(last) >= len(self.hosts) and min(last) >= step

        wait_until(reached, 60.0)


def _inline(table: dict[str, str]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + " }"


@pytest.fixture
def cluster(bed: Testbed, tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "notes").mkdir()
    yield Cluster(bed, tmp_path)
    for host in HOSTS:
        bed.mend(host)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


# The same result


def test_four_hosts_train_the_example_as_one_machine_does(cluster: Cluster, tmp_path: Path) -> None:
    generator = random.Random(0)
    words = [f"w{generator.randrange(60)}" for _ in range(6000)]
    (tmp_path / "text.txt").write_text(" ".join(words).replace("w0", "w0\n"))
    script = [str(ROOT / "examples" / "lm1b.py"), "--text", "text.txt", "--steps", "20"]
    script += ["--width", "16", "--hidden", "32", "--samples", "20", "--batch-size", "8"]
    script += ["--window", "10", "--eval-windows", "16", "--out"]
    ended = cluster.run("--hosts", cluster.hosts_file(), *script, "runs/hosts")
    assert ended.code == 0, ended.stderr
    local = subprocess.run(
        [*COMMAND, "run", "-n", "4", *script, "runs/local"],
        cwd=tmp_path,
        env=cluster.environ(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert local.returncode == 0, local.stderr
    ours, theirs = (
        torch.load(tmp_path / "runs" / name / "model.pt", weights_only=True)
        for name in ("hosts", "local")
    )
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "runs/hosts/result.json").read_text())["num_workers"] == 4
    cluster.wait_until_empty(END_SECONDS)


def test_two_hosts_with_two_workers_know_who_is_where(cluster: Cluster) -> None:
    cluster.hosts = ["a", "b"]
    cluster.write(
        "where.py",
        """
        import json, os, socket, torch, parallax
        model = torch.nn.Linear(1, 1)
        session = parallax.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
        names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE"]
        print(json.dumps([socket.gethostname(), session.rank, session.local_rank,
                          [list(ranks) for ranks in session.hosts.workers],
                          [int(os.environ[name]) for name in names]]))
        """,
    )
    ended = cluster.run("--hosts", cluster.hosts_file(workers=2), "where.py")
    assert ended.code == 0, ended.stderr
    groups = [[0, 1], [2, 3]]
    assert sorted(ended.stdout.splitlines()) == [
        f"[{host} worker {rank}] " + json.dumps([host, rank, local, groups, [local, 2, group, 4]])
        for host, rank, local, group in (
            ("a", 0, 0, 0),
            ("a", 1, 1, 0),
            ("b", 2, 0, 1),
            ("b", 3, 1, 1),
        )
    ]


def test_hosts_may_have_different_numbers_of_workers_and_devices(cluster: Cluster) -> None:
    cluster.write(
        "hosts.toml",
        f"""
        [defaults]
        python = {json.dumps(sys.executable)}
        environment = {{ PYTHONPATH = {json.dumps(SOURCE)} }}
        [[hosts]]
        host = "b"
        devices = [3, 1]
        [[hosts]]
        host = "a"
        """,
    )
    cluster.write(
        "show.py",
        """
        import os
        names = ["RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "PARALLAX_DEVICES"]
        print(*(os.environ.get(name) for name in names))
        """,
    )
    ended = cluster.run("--hosts", "hosts.toml", "show.py")
    assert sorted(ended.stdout.splitlines()) == [
        "[a worker 2] 2 0 None None",
        "[b worker 0] 0 0 3 None",
        "[b worker 1] 1 1 1 None",
    ], ended.stderr


# Failures in the middle


def kill_worker(cluster: Cluster, host: str) -> None:
    os.kill(cluster.processes(host, "launch.host.worker")[0], signal.SIGKILL)


def kill_agent(cluster: Cluster, host: str) -> None:
    os.kill(cluster.processes(host, "launch.host.agent")[0], signal.SIGKILL)


def kill_host_process(cluster: Cluster, host: str) -> None:
    os.kill(cluster.processes(host, "launch.host.process")[0], signal.SIGKILL)


def cut_link(cluster: Cluster, host: str) -> None:
    cluster.bed.cut(host)


def mend_link(cluster: Cluster, host: str) -> None:
    cluster.bed.mend(host)


Blow = Callable[[Cluster, str], None]
# Host a has worker 0 and the meeting point of all.
BLOWS = [
    (kill_worker, "b", r"worker 1 on b was ended by signal 9.* at step 20"),
    (kill_agent, "a", r"the agent on a, which starts worker 0, was ended by signal 9 at step 20"),
    (kill_host_process, "b", r"host b \(worker 1\) is lost: .* exit code \d+ at step 20"),
    (cut_link, "a", r"host a \(worker 0\) is lost: no sign of life for 8 s at step 20"),
]


@pytest.mark.parametrize(("blow", "host", "message"), BLOWS)
def test_a_blow_ends_the_job_and_names_the_host(
    cluster: Cluster, blow: Blow, host: str, message: str
) -> None:
    cluster.hosts = ["a", "b"]
    cluster.write("train.py", TRAIN)
    with cluster.start("--hosts", cluster.hosts_file(), "train.py", "600", "20") as process:
        cluster.wait_for_step(20)
        time.sleep(2.0)  # its host tells of it once a second
        begin = time.monotonic()
        cluster.strike(blow, host)
        _, stderr = process.communicate(timeout=FAILURE_SECONDS)
    assert time.monotonic() - begin < FAILURE_SECONDS
    assert process.returncode != 0
    assert re.search(f"parallax: {message}", stderr), stderr
    cluster.wait_until_empty(END_SECONDS)


@pytest.mark.parametrize("blow", [kill_worker, kill_agent])
def test_a_restart_goes_on_from_the_checkpoint_and_loses_no_sample(
    cluster: Cluster, blow: Blow
) -> None:
    cluster.hosts = ["a", "b"]
    cluster.write("train.py", TRAIN)
    options = ["--max-restarts", "1", "--resume", "checkpoints"]
    command = ["--hosts", cluster.hosts_file(), *options, "train.py", "160", "12"]
    with cluster.start(*command) as process:
        cluster.wait_for_step(12)
        cluster.strike(blow, "b")
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stdout + stderr
    assert "restart 1 of 1 from " in stderr
    attempts = cluster.attempts()
    assert list(attempts) == [0, 10]  # a checkpoint every 5 steps, and 12 had been taken
    assert [len(notes) for notes in attempts.values()] == [2, 2]
    assert samples_of(attempts) == list(range(160))
    cluster.wait_until_empty(END_SECONDS)


def test_a_host_that_was_cut_is_done_without_until_it_comes_back(cluster: Cluster) -> None:
    """The one with worker 0 and the meeting point. No sample is lost in either restart."""
    cluster.hosts = ["a", "b"]
    cluster.write("train.py", TRAIN)
    options = ["--max-restarts", "2", "--resume", "checkpoints"]
    command = ["--hosts", cluster.hosts_file(), *options, "train.py", "480", "12"]
    with cluster.start(*command) as process:
        cluster.wait_for_step(12)
        cluster.strike(cut_link, "a")
        # The other goes on alone, from step 10, beyond another checkpoint.
        wait_until(lambda: any(n[-1].get("step", 0) > 16 for n in cluster.notes()), 60.0)
        cluster.bed.mend("a")
        kill_worker(cluster, "b")
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stdout + stderr
    assert "parallax: host a (worker 0) is lost: no sign of life for 8 s" in stderr
    assert "parallax: host a: " in stderr
    assert "going on without it" in stderr
    attempts = cluster.attempts()
    assert [len(notes) for notes in attempts.values()] == [2, 1, 2]
    assert samples_of(attempts) == list(range(480))
    cluster.wait_until_empty(END_SECONDS)


def samples_of(attempts: dict[int, list[list[dict]]]) -> list[int]:
    """What was trained on: of each attempt, up to the step from which the next one began."""
    begins = list(attempts)
    found = []
    for notes, end in zip(attempts.values(), [*begins[1:], sys.maxsize], strict=True):
        entries = [entry for note in notes for entry in note if "step" in entry]
        found += [sample for e in entries if e["step"] <= end for sample in e["ids"]]
    return sorted(found)


def test_a_restart_waits_for_a_host_when_none_is_left(cluster: Cluster) -> None:
    cluster.hosts = ["a"]
    cluster.write("train.py", TRAIN)
    options = ["--max-restarts", "3", "--resume", "checkpoints"]
    with cluster.start("--hosts", cluster.hosts_file(), *options, "train.py", "40", "6") as process:
        cluster.wait_for_step(6)
        # Its worker is alone, and waits at the gate until its host is given up.
        cluster.bed.cut("a")
        assert process.stderr is not None
        said = []
        while not said or not said[-1].startswith("parallax: waiting 10 s for a host"):
            said.append(process.stderr.readline())
            assert said[-1], said
        cluster.strike(mend_link, "a")
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(said) + stderr
    assert "restart 2 of 3 from checkpoints" in stderr
    assert [note[0]["begin"] for note in cluster.notes() if "end" in note[-1]] == [5]


def test_a_reader_that_takes_its_time_loses_no_host(cluster: Cluster) -> None:
    cluster.hosts = ["a"]
    cluster.write("train.py", "for i in range(120_000): print(i, 'x' * 100)\n")
    with cluster.start("--hosts", cluster.hosts_file(), "train.py") as process:
        wait_until(lambda: bool(cluster.processes("a", "launch.host.worker")), 30)
        time.sleep(10)  # longer than a host would wait for a launcher that is silent
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert len(stdout.splitlines()) == 120_000


def test_the_traceback_comes_last_with_host_worker_and_step(cluster: Cluster) -> None:
    cluster.hosts = ["a", "b"]
    cluster.write(
        "train.py",
        TRAIN.replace(
            "time.sleep(0.02)", "assert session.step < 7 or session.rank == 0, 'bad batch'"
        ),
    )
    ended = cluster.run("--hosts", cluster.hosts_file(), "--log-dir", "logs", "train.py", "60", "0")
    assert ended.code == 1
    assert (
        "parallax: worker 1 on b failed at step 7 with exit code 1 (AssertionError: bad batch)"
        in (ended.stderr)
    )
    assert ended.stderr.splitlines()[-1] == "AssertionError: bad batch"
    log = (cluster.path / "logs" / "worker-1.log").read_text()
    assert "begins at step 0 with 2 workers\n" in log
    assert log.endswith("AssertionError: bad batch\n")


def test_what_a_worker_on_another_host_caused_is_not_blamed(cluster: Cluster) -> None:
    cluster.hosts = ["a", "b"]
    cluster.write(
        "train.py",
        """
        import os, time
        from parallax.errors import WorkerLostError
        if os.environ["RANK"] == "1":
            raise WorkerLostError("worker 0 is gone")
        time.sleep(9)
        raise ValueError("the cause")
        """,
    )
    ended = cluster.run("--hosts", cluster.hosts_file(), "train.py")
    assert ended.stderr.splitlines()[-1] == "ValueError: the cause", ended.stderr


def test_an_exit_code_is_the_commands(cluster: Cluster) -> None:
    cluster.hosts = ["a", "b", "c"]
    cluster.write("train.py", "import os, sys\nsys.exit(7 if os.environ['RANK'] == '2' else 0)\n")
    ended = cluster.run("--hosts", cluster.hosts_file(), "train.py")
    assert ended.code == 7
    assert ended.stderr == "parallax: worker 2 on c failed with exit code 7.\n"


# Ends from outside


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_every_remote_process(
    cluster: Cluster, number: signal.Signals
) -> None:
    cluster.hosts = ["a", "b"]
    # Workers with children of their own, which do not listen to SIGTERM.
    ignore = "import signal, subprocess\nsubprocess.Popen(['sleep', '600'])\n"
    cluster.write("train.py", f"{ignore}signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEP}")
    with cluster.start("--hosts", cluster.hosts_file(), "train.py") as process:
        assert process.stdout is not None
        for _ in cluster.hosts:
            assert process.stdout.readline().endswith("started\n")
        assert all(len(cluster.processes(host)) >= 4 for host in cluster.hosts)
        begin = time.monotonic()
        process.send_signal(number)
        cluster.wait_until_empty(END_SECONDS)
        assert process.wait(END_SECONDS) in (-number, 128 + number)
        assert time.monotonic() - begin < END_SECONDS + 2


def test_a_launcher_that_is_cut_off_ends_every_remote_process(cluster: Cluster) -> None:
    cluster.hosts = ["a", "b"]
    cluster.write("train.py", SLEEP)
    with cluster.start("--hosts", cluster.hosts_file(), "train.py") as process:
        assert process.stdout is not None
        for _ in cluster.hosts:
            assert process.stdout.readline().endswith("started\n")
        process.send_signal(signal.SIGSTOP)  # as good as dead: it says nothing, and closes nothing
        cluster.wait_until_empty(END_SECONDS)


# Hostile inputs


def test_arguments_reach_every_host_unchanged(cluster: Cluster) -> None:
    cluster.hosts = ["a", "b"]
    directory = cluster.path / "a 'strange' \"directory\"; $(touch x)"
    directory.mkdir()
    script = "dump $(touch y) 'it'.py"
    (directory / script).write_text(
        "import json, os, sys\n"
        "json.dump([sys.argv, os.environ['STRANGE']], open(os.environ['RANK'], 'w'))\n"
    )
    strange = "a b'\"; $(touch z) `touch z`\n\\ ü"
    hostile = ["", " ", "a b", "'", '"', "a\nb", ";ls", "$(touch w)", "`touch w`", "$HOME", "\\"]
    hostile += ["*", "~", "ü☃", "\udcff", "-n", "--hosts", "&& touch w", "|", "${local_rank}", "%s"]
    file = cluster.hosts_file(directory=str(directory), environment={"STRANGE": strange})
    ended = cluster.run("--hosts", file, script, *hostile)
    assert ended.code == 0, ended.stderr
    for rank in ("0", "1"):
        assert json.loads((directory / rank).read_text()) == [[script, *hostile], strange]
    assert sorted(os.listdir(directory)) == sorted([script, "0", "1"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": "nowhere"}, "host nowhere: .*resolve.*check it in the hosts file"),
        ({"host": SILENT}, "host silent: .*refused.*is sshd running"),
        ({"host": LOCKED}, "host locked: .*Permission denied.*ssh-copy-id locked"),
        ({"host": "b", "user": "nobody"}, "host b: .*Permission denied.*ssh-copy-id nobody@b"),
        ({"host": "b", "directory": "/no/such"}, "host b: cannot enter the directory '/no/such'"),
        ({"host": "b", "python": "/no/python"}, "host b: there is no python at /no/python"),
        ({"host": "b", "interface": "eth7"}, "host b: there is no interface 'eth7'.*eth0 10"),
        ({"host": "b", "address": "10.9.9.9"}, "host b: its address '10.9.9.9'.*none of its own"),
    ],
)
def test_a_host_that_cannot_start_says_what_to_do(
    cluster: Cluster, change: dict[str, object], message: str
) -> None:
    cluster.write("train.py", "print('must not run')")
    entry = {"python": sys.executable, "directory": str(cluster.path), **change}
    hosts = f'[defaults]\nenvironment = {{ PYTHONPATH = "{SOURCE}" }}\n'
    hosts += f'[[hosts]]\nhost = "a"\npython = {json.dumps(sys.executable)}\n[[hosts]]\n'
    hosts += "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items())
    cluster.write("hosts.toml", hosts)
    ended = cluster.run("--hosts", "hosts.toml", "train.py", timeout=30)
    assert ended.code == 1
    assert re.fullmatch(f"parallax: {message}.*\n", ended.stderr), ended.stderr
    assert "must not run" not in ended.stdout
    cluster.wait_until_empty(END_SECONDS)


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("torch", "host b has torch 1.2.3 and host a has .*: install the same version"),
        ("parallax_torch", "host b: it has parallax 1.2.3 and the launcher has .*same version"),
    ],
)
def test_another_version_is_refused(cluster: Cluster, package: str, message: str) -> None:
    other = cluster.path / "other" / f"{package}-1.2.3.dist-info"
    other.mkdir(parents=True)
    name = package.replace("_", "-")
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
    cluster.write("train.py", "")
    hosts = f"[defaults]\npython = {json.dumps(sys.executable)}\n"
    for host, path in (("a", SOURCE), ("b", f"{other.parent}{os.pathsep}{SOURCE}")):
        hosts += (
            f'[[hosts]]\nhost = "{host}"\nenvironment = {{ PYTHONPATH = {json.dumps(path)} }}\n'
        )
    cluster.write("hosts.toml", hosts)
    ended = cluster.run("--hosts", "hosts.toml", "train.py", timeout=30)
    assert ended.code == 1
    assert re.fullmatch(f"parallax: {message}.*\n", ended.stderr), ended.stderr


# parallax check


def test_a_check_measures_every_link_and_keeps_it(bed: Testbed, cluster: Cluster) -> None:
    cluster.hosts = ["a", "b", "c"]
    file = cluster.hosts_file()
    bed.shape("c", "50mbit")
    try:
        ended = cluster.check("--hosts", file)
    finally:
        bed.shape("c", "10gbit")
    assert ended.code == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    links = [line.split()[:2] for line in lines if line.count("bit/s") == 2]
    for name in cluster.hosts:
        assert any(line.split()[:3] == [name, bed.host(name).address, "eth0"] for line in lines)
    assert links == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert any(line.startswith("ready: 3 hosts") for line in lines)
    (kept,) = (cluster.path / "cache").rglob("*.json")
    links = {(e["from"], e["to"]): e for e in json.loads(kept.read_text())["links"]}
    rates = {pair: link["send_bytes_per_second"] * 8 for pair, link in links.items()}
    assert len(rates) == 3
    # The machine may be busy: it is the right links that must be the slow ones.
    slow = [rate for pair, rate in rates.items() if "c" in pair]
    assert max(slow) < 60e6
    assert max(slow) < min(rate for pair, rate in rates.items() if "c" not in pair)
    cluster.wait_until_empty(END_SECONDS)


def test_a_check_says_what_is_wrong_and_goes_on_with_the_rest(cluster: Cluster) -> None:
    cluster.hosts = ["a", "b", "nowhere"]
    cluster.bed.cut("b")
    ended = cluster.check("--hosts", cluster.hosts_file())
    assert ended.code == 1
    text = " ".join(ended.stdout.split())
    assert "not ready: " in text
    assert "nowhere: " in text
    assert "b: " in text
    assert "does a firewall let ssh through" in text
    assert any(line.split()[:2] == ["a", "10.83.0.1"] for line in ended.stdout.splitlines())


# Security


def test_nothing_listens_but_where_it_was_asked_to(cluster: Cluster) -> None:
    cluster.hosts = ["a", "b"]
    cluster.write("train.py", TRAIN)
    with cluster.start("--hosts", cluster.hosts_file(), "train.py", "600", "2"):
        cluster.wait_for_step(2)
        for name in cluster.hosts:
            own = next(host.address for host in cluster.bed.hosts if host.name == name)
            pid = cluster.processes(name, "launch.host.worker")[0]
            assert listening(pid) <= {own, "127.0.0.1"}
            assert own in listening(pid)


def test_secrets_of_the_hosts_file_are_shown_nowhere(cluster: Cluster) -> None:
    cluster.hosts = ["a", "b"]
    cluster.write("train.py", SLEEP)
    file = cluster.hosts_file(environment={"API_TOKEN": "hunter2"})
    with cluster.start("--hosts", file, "--log-dir", "logs", "train.py") as process:
        assert process.stdout is not None
        for _ in cluster.hosts:
            process.stdout.readline()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):
                assert b"hunter2" not in path.read_bytes()
        process.terminate()
        stdout, stderr = process.communicate(timeout=20)
    assert "hunter2" not in stdout + stderr
    assert all("hunter2" not in log.read_text() for log in (cluster.path / "logs").iterdir())


def listening(pid: int) -> set[str]:
    """The addresses on which the process's host takes connections."""
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            number = bytes.fromhex(local.partition(":")[0])
            found.add(".".join(str(byte) for byte in reversed(number)))
    for line in Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]:
        if line.split()[3] == "0A":
            found.add("IPv6 " + line.split()[1])
    return found
