"""`parallax run`, as a user starts it: real processes, real signals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import parallax
from parallax.launch.interface import addresses, is_loopback

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# What the installed `parallax` script does, and where the package is if it is not installed.
CODE = "import sys; del sys.path[0]; from parallax.launch.command import main; sys.exit(main())"
COMMAND = [sys.executable, "-c", CODE]
SOURCE = str(Path(parallax.__file__).resolve().parents[1])
# The time in which a job must be over once there is a reason for it to end.
END_SECONDS = 15.0
FOREVER = "import time\ntime.sleep(600)\n"
WRITE_PID = "import os\nopen(f'pid-{os.environ[\"RANK\"]}', 'w').write(str(os.getpid()))\n"


# Two for each worker, one of them in a session of its own, as servers and trackers are.
CHILDREN = """
import os, subprocess
for number, apart in enumerate((False, True), start=1):
    child = subprocess.Popen(["sleep", "600"], start_new_session=apart)
    open(f"pid-{int(os.environ['RANK']) + 2 * number}", "w").write(str(child.pid))
"""


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()


@dataclass
class Directory:
    """Where a test's scripts are and its command runs."""

    path: Path

    def write(self, name: str, *parts: str) -> str:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(textwrap.dedent(part) for part in parts))
        return name

    def environ(self, **variables: str) -> dict[str, str]:
        """The temporary directory is here too, to see what is left in it."""
        temporary = self.path / "tmp"
        temporary.mkdir(exist_ok=True)
        return {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": SOURCE, **variables}

    def run(self, *arguments: str, **variables: str) -> Ended:
        done = subprocess.run(
            [*COMMAND, "run", *arguments],
            cwd=self.path,
            env=self.environ(**variables),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert list((self.path / "tmp").iterdir()) == []
        return Ended(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def start(self, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [*COMMAND, "run", *arguments],
            cwd=self.path,
            env=self.environ(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A test run in the background ignores SIGINT, and would hand that down.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def pids(self, num_workers: int) -> list[int]:
        """The workers' process ids, when all have written them down."""
        files = [self.path / f"pid-{rank}" for rank in range(num_workers)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), 30.0)
        return [int(file.read_text()) for file in files]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that is dead but not yet collected does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


# Output


def test_lines_carry_the_name_of_their_worker_in_order(directory: Directory) -> None:
    directory.write(
        "train.py",
        """
        import os, sys
        rank = os.environ["RANK"]
        for i in range(2000):
            print(f"{rank}:{i}")
        print("a warning", file=sys.stderr)
        sys.stdout.write("no newline")
        """,
    )
    ended = directory.run("-n", "3", "train.py")
    assert ended.code == 0
    for rank in range(3):
        own = [line for line in ended.lines if line.startswith(f"[worker {rank}] ")]
        expected = [f"{rank}:{i}" for i in range(2000)] + ["no newline"]
        assert own == [f"[worker {rank}] {text}" for text in expected]
    assert sorted(ended.stderr.splitlines()) == [f"[worker {rank}] a warning" for rank in range(3)]


def test_output_appears_while_the_job_runs(directory: Directory) -> None:
    directory.write("train.py", "print('started')\n", FOREVER)
    with directory.start("-n", "1", "train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[worker 0] started\n"
        process.terminate()
        assert process.wait(END_SECONDS) == 128 + signal.SIGTERM


def test_a_progress_bar_leaves_its_last_state(directory: Directory) -> None:
    directory.write(
        "train.py",
        r"""
        import sys
        for i in range(101):
            sys.stderr.write(f"\r{i}%")
            sys.stderr.flush()
        sys.stderr.write("\nafter\n")
        """,
    )
    ended = directory.run("-n", "1", "train.py")
    assert ended.stderr == "[worker 0] 100%\n[worker 0] after\n"


def test_what_a_script_writes_past_python_is_shown_too(directory: Directory) -> None:
    directory.write(
        "train.py",
        r"""
        import os
        os.write(1, b"\xff\n")
        os.system("echo from a shell; echo again > /dev/stdout")
        """,
    )
    ended = directory.run("-n", "1", "train.py")
    assert ended.lines == ["[worker 0] \ufffd", "[worker 0] from a shell", "[worker 0] again"]


def test_a_log_file_for_each_worker(directory: Directory) -> None:
    directory.write(
        "train.py",
        """
        import os
        print("rank", os.environ["RANK"])
        raise ValueError("bad")
        """,
    )
    directory.run("-n", "1", "--log-dir", "the logs", "train.py")
    log = (directory.path / "the logs" / "worker-0.log").read_text()
    assert log.startswith("rank 0\nTraceback")
    assert log.endswith("ValueError: bad\n")


def test_a_reader_that_takes_its_time_misses_nothing(directory: Directory) -> None:
    """As a pager does: more than every buffer on the way holds waits for it."""
    directory.write("train.py", WRITE_PID, "for i in range(120_000): print(i, 'x' * 100)\n")
    with directory.start("-n", "1", "train.py") as process:
        (pid,) = directory.pids(1)
        time.sleep(6.0)  # longer than any wait for it would be
        assert is_alive(pid)  # it stands in a print, as on a terminal
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert len(stdout.splitlines()) == 120_000
    assert stdout.splitlines()[-1].startswith("[worker 0] 119999 x")


def test_what_a_worker_left_behind_waits_for_the_reader(directory: Directory) -> None:
    """As much as the buffers on the way hold: the worker has ended long before it is read."""
    directory.write("train.py", WRITE_PID, "for i in range(60_000): print(i, 'x' * 100)\n")
    with directory.start("-n", "1", "train.py") as process:
        (pid,) = directory.pids(1)
        wait_until(lambda: not is_alive(pid), 30.0)
        time.sleep(6.0)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert len(stdout.splitlines()) == 60_000


def test_ctrl_c_ends_a_command_whose_reader_does_not_read(directory: Directory) -> None:
    directory.write("train.py", WRITE_PID, "while True: print('x' * 100)")
    with directory.start("-n", "1", "train.py") as process:
        pids = directory.pids(1)
        time.sleep(2.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) == 130
    wait_until(lambda: not any(map(is_alive, pids)), 2.0)


def test_a_terminal_shows_how_the_job_is_doing(directory: Directory) -> None:
    directory.write(
        "train.py",
        """
        import time, torch, parallax
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = parallax.parallelize(model, optimizer)
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        time.sleep(2.5)
        raise ValueError("the end")
        """,
    )
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "run", "-n", "2", "train.py"],
        cwd=directory.path,
        env=directory.environ(TERM="xterm"),
        stdout=slave,
        stderr=slave,
    ):
        os.close(slave)
        shown = read_all(master).decode()
    # The rate is there if an earlier step was seen too.
    assert re.search(r"step 3 (· \S+ steps/s )?· 2 workers · 0:00:\d\d", shown), shown
    assert re.search(r"\x1b\[31mparallax: worker . failed at step 3 with", shown), shown
    assert shown.count("Traceback") == 1  # torch's hook, which a process group brings, is silent


def read_all(fd: int) -> bytes:
    data = b""
    while True:
        try:
            data += os.read(fd, 1 << 16)
        except OSError:  # that is how a terminal ends
            os.close(fd)
            return data


def test_a_reader_that_leaves_ends_the_job(directory: Directory) -> None:
    directory.write("train.py", WRITE_PID, "while True: print('x' * 100)")
    with directory.start("-n", "2", "train.py") as process:
        pids = directory.pids(2)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(END_SECONDS) == 128 + signal.SIGPIPE
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert not any(map(is_alive, pids))


# What the script finds


def test_arguments_reach_the_script_unchanged(directory: Directory) -> None:
    hostile = [
        "-n", "5", "--", "--log-dir=x", "-m", "--help", "", " ", "a b", "'", '"', "a\nb", ";ls",
        "$(ls)", "`ls`", "$$", "$HOME", "${local_rank}", "\\", "*", "~", "ü☃", "\udcff", "\t",
    ]  # fmt: skip
    directory.write("dump.py", "import json, sys\njson.dump(sys.argv, open('argv.json', 'w'))\n")
    for options in (["dump.py"], ["--", "dump.py"]):
        ended = directory.run("-n", "1", *options, *hostile)
        assert ended.code == 0, ended.stderr
        argv = json.loads((directory.path / "argv.json").read_text())
        assert argv == ["dump.py", *hostile]


def test_a_script_finds_what_python_gives_it(directory: Directory) -> None:
    directory.write("code/beside.py", "name = 'beside'\n")
    directory.write("types.py", "raise ImportError('the current directory is not searched')\n")
    directory.write(
        "code/train file.py",
        """
        import json, os, sys, types
        import beside
        print(json.dumps([__name__, __file__, sys.argv, sys.path[0], "torch" in sys.modules]))
        print(sys.modules["__main__"].__dict__ is globals())
        print(sorted(name for name in os.environ if name.startswith("PARALLAX")))
        """,
    )
    first, *others = directory.run("-n", "1", "code/train file.py").lines
    code = directory.path / "code"
    assert json.loads(first.removeprefix("[worker 0] ")) == [
        "__main__", str(code / "train file.py"), ["code/train file.py"], str(code), False
    ]  # fmt: skip
    assert others == ["[worker 0] True", "[worker 0] ['PARALLAX_INTERFACE', 'PARALLAX_STEP_FILE']"]


def test_a_module_runs_as_python_runs_it(directory: Directory) -> None:
    directory.write("package/__init__.py", "")
    directory.write("package/other.py", "name = 'other'\n")
    directory.write(
        "package/train.py",
        """
        import sys
        from .other import name
        print(name, __name__, __package__, sys.argv)
        """,
    )
    file = directory.path / "package" / "train.py"
    for options in (["-m", "package.train"], ["-mpackage.train"]):
        ended = directory.run("-n", "2", *options, "-m", "x")
        line = f"other __main__ package {[str(file), '-m', 'x']}"
        assert sorted(ended.lines) == [f"[worker 0] {line}", f"[worker 1] {line}"]


def test_workers_find_each_other_by_their_environment(directory: Directory) -> None:
    directory.write(
        "train.py",
        """
        import os
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
        print([os.environ[name] for name in names], int(os.environ["MASTER_PORT"]) > 0)
        print(os.environ["OMP_NUM_THREADS"])
        """,
    )
    ended = directory.run("-n", "2", "train.py", OMP_NUM_THREADS="7")
    assert sorted(ended.lines) == [
        "[worker 0] 7",
        "[worker 0] ['0', '0', '2', '2', '127.0.0.1'] True",
        "[worker 1] 7",
        "[worker 1] ['1', '1', '2', '2', '127.0.0.1'] True",
    ]


def test_workers_form_a_process_group(directory: Directory) -> None:
    directory.write(
        "train.py",
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        print(total.item())
        dist.destroy_process_group()
        """,
    )
    ended = directory.run("-n", "2", "train.py")
    assert sorted(ended.lines) == ["[worker 0] 3.0", "[worker 1] 3.0"], ended.stderr


def test_nothing_is_open_to_the_network(directory: Directory) -> None:
    """Also not on the address by which the user is logged in."""
    directory.write(
        "train.py",
        """
        import os, torch.distributed as dist
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        dist.init_process_group("gloo")

        def sockets(pid):
            links = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
            names = [os.readlink(link) for link in links if os.path.lexists(link)]
            return {name[8:-1] for name in names if name.startswith("socket:[")}

        own = sockets(os.getpid()) | sockets(os.getppid())
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in open(table).readlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in own:
                    print(words[1].partition(":")[0])
        dist.barrier()
        """,
    )
    own = next((found for _, found in addresses() if not is_loopback(found)), "192.0.2.1")
    ended = directory.run("-n", "2", "train.py", SSH_CONNECTION=f"192.0.2.9 1 {own} 22")
    assert ended.code == 0, ended.stderr
    # The agent's store, seen by both workers, and what gloo listens on.
    assert {line.split()[-1] for line in ended.lines} == {"0100007F"}
    assert len(ended.lines) >= 4


def test_the_id_of_a_job_is_its_own(directory: Directory) -> None:
    directory.write("train.py", "import os\nprint(os.environ['TORCHELASTIC_RUN_ID'])\n")
    ids = {directory.run("-n", "1", "train.py").stdout for _ in range(2)}
    assert len(ids) == 2
    assert all(len(line) >= 16 for line in ids)


def test_a_session_left_open_ends_well(directory: Directory) -> None:
    """Its threads stand in torch's code nearly all the time here. See [Note: thread end] in
    comm/threads.py."""
    directory.write(
        "train.py",
        """
        import torch, parallax
        from torch.utils.data import DataLoader
        from parallax.cluster import heartbeats
        heartbeats.BEAT_SECONDS = 0.0
        model = torch.nn.Embedding(50_000, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = parallax.parallelize(model, optimizer)
        for ids in session.shard(DataLoader(torch.arange(50_000), 5_000)):
            model(ids).sum().backward()
            optimizer.step()
            if session.step == 3:
                break
        """,
    )
    cache = str(directory.path / "cache")
    ended = directory.run("-n", "2", "train.py", TORCHINDUCTOR_CACHE_DIR=cache)
    assert ended.code == 0, ended.stderr


# Failures


def test_one_exit_code_ends_all_and_is_returned(directory: Directory) -> None:
    directory.write(
        "train.py",
        WRITE_PID,
        "import sys, time\n",
        "time.sleep(0.5)\nif os.environ['RANK'] == '1': sys.exit(3)\n",
        FOREVER,
    )
    begin = time.monotonic()
    ended = directory.run("-n", "3", "train.py")
    assert time.monotonic() - begin < END_SECONDS
    assert ended.code == 3
    assert ended.stderr == "parallax: worker 1 failed with exit code 3.\n"
    assert not any(map(is_alive, directory.pids(3)))


def test_the_traceback_comes_last_and_starts_in_the_script(directory: Directory) -> None:
    directory.write(
        "train.py",
        """
        import os, sys, time

        def step():
            raise ValueError("bad batch")

        print("about to fail", file=sys.stderr)
        if os.environ["RANK"] == "1":
            step()
        time.sleep(600)
        """,
    )
    ended = directory.run("-n", "2", "train.py")
    assert ended.code == 1
    _, _, last = ended.stderr.partition("parallax: ")
    lines = last.splitlines()
    assert lines[0] == "worker 1 failed with exit code 1 (ValueError: bad batch). Its traceback:"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2] == f'  File "{directory.path / "train.py"}", line 9, in <module>'
    assert lines[-1] == "ValueError: bad batch"
    assert ended.stderr.count("Traceback") == 1


@pytest.mark.parametrize("code", ["a b", "import nowhere_to_be_found"])
def test_a_script_that_cannot_start_says_why(directory: Directory, code: str) -> None:
    directory.write("train.py", code)
    ended = directory.run("-n", "2", "train.py")
    assert ended.code == 1
    assert "launch" not in ended.stderr
    assert "Error: " in ended.stderr.splitlines()[-1]


def test_a_missing_module_is_named(directory: Directory) -> None:
    ended = directory.run("-n", "1", "-m", "nowhere.to_be_found")
    assert ended.code == 1
    assert "nowhere" in ended.stderr.splitlines()[-1]


def test_a_message_on_exit_is_shown(directory: Directory) -> None:
    directory.write("train.py", "import sys\nsys.exit('no data')\n")
    ended = directory.run("-n", "1", "train.py")
    assert ended.code == 1
    assert ended.stderr.splitlines() == [
        "[worker 0] no data",
        "parallax: worker 0 failed with exit code 1 (no data).",
    ]


def test_what_a_lost_peer_causes_is_not_blamed(directory: Directory) -> None:
    directory.write(
        "train.py",
        """
        import os, time
        from parallax.errors import WorkerLostError
        if os.environ["RANK"] == "0":
            raise WorkerLostError("worker 1 is gone")
        time.sleep(0.5)
        raise ValueError("the cause")
        """,
    )
    ended = directory.run("-n", "2", "train.py")
    assert ended.stderr.splitlines()[-1] == "ValueError: the cause"


def test_a_killed_worker_is_named_with_its_signal(directory: Directory) -> None:
    directory.write(
        "train.py",
        WRITE_PID,
        """
        import signal, time
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.exists("pid-1"):
            time.sleep(0.01)
        pid = int(open("pid-1").read() or 0)
        while pid and open(f"/proc/{pid}/stat").read().split()[2] != "Z":
            time.sleep(0.001)
        raise RuntimeError("connection closed by peer")
        """,
    )
    ended = directory.run("-n", "2", "train.py")
    assert ended.code == 128 + signal.SIGKILL
    assert "parallax: worker 1 was ended by signal 9 (SIGKILL)" in ended.stderr


def test_a_crash_in_native_code_shows_where_python_was(directory: Directory) -> None:
    directory.write("train.py", "import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()\n")
    ended = directory.run("-n", "1", "train.py")
    assert ended.code == 128 + signal.SIGSEGV
    assert "line 2 in crash" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("parallax: worker 0 was ended by signal 11")


# Ends from outside


def test_ctrl_c_leaves_no_process(directory: Directory) -> None:
    directory.write(
        "train.py",
        CHILDREN,
        WRITE_PID,
        FOREVER,
    )
    with directory.start("-n", "2", "train.py") as process:
        pids = directory.pids(6) + children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    wait_until(lambda: not any(map(is_alive, pids)), 2.0)


def test_ctrl_c_twice_ends_workers_that_do_not_listen(directory: Directory) -> None:
    directory.write(
        "train.py",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        WRITE_PID,
        FOREVER,
    )
    with directory.start("-n", "2", "train.py") as process:
        pids = directory.pids(2) + children(process.pid)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert all(map(is_alive, pids))
        process.send_signal(signal.SIGINT)
        assert process.wait(3.0) == 130
    wait_until(lambda: not any(map(is_alive, pids)), 2.0)


def test_a_signal_during_the_start_leaves_no_process(directory: Directory) -> None:
    directory.write("train.py", FOREVER)
    for delay in (0.3, 1.0):
        with directory.start("-n", "2", "train.py") as process:
            wait_until(lambda: bool(children(process.pid)), 10.0)
            pids = children(process.pid)
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_SECONDS) == 128 + signal.SIGTERM
        wait_until(lambda: not any(map(is_alive, pids)), 2.0)  # noqa: B023


def test_kill_9_of_the_launcher_leaves_no_process(directory: Directory) -> None:
    directory.write("train.py", WRITE_PID, FOREVER)
    with directory.start("-n", "2", "train.py") as process:
        pids = directory.pids(2) + children(process.pid)
        process.kill()
        process.wait(END_SECONDS)
        wait_until(lambda: not any(map(is_alive, pids)), END_SECONDS)


def test_kill_9_of_the_host_process_leaves_nothing(directory: Directory) -> None:
    directory.write("train.py", CHILDREN.replace("(False, True)", "(False,)"), WRITE_PID, FOREVER)
    with directory.start("-n", "2", "train.py") as process:
        pids = directory.pids(4)
        (host,) = children(process.pid)
        pids += children(host)
        os.kill(host, signal.SIGKILL)
        assert process.wait(END_SECONDS) == 1
        assert process.stderr is not None
        assert "the process that looks after workers 0, 1 is lost" in process.stderr.read()
    wait_until(lambda: not any(map(is_alive, pids)), END_SECONDS)
    wait_until(lambda: not list((directory.path / "tmp").glob("parallax-*")), END_SECONDS)


def test_an_agent_that_is_killed_is_reported(directory: Directory) -> None:
    directory.write("train.py", WRITE_PID, FOREVER)
    with directory.start("-n", "2", "train.py", LOGLEVEL="INFO") as process:
        pids = directory.pids(2)
        (host,) = children(process.pid)
        agent = next(pid for pid in children(host) if "launch.host.agent" in command_of(pid))
        os.kill(agent, signal.SIGKILL)
        assert process.wait(END_SECONDS) == 1
        assert process.stderr is not None
        said = process.stderr.read()
        assert "was ended by signal 9" in said
        # torch logs the configuration: the secret of the job must not be in it.
        assert "rdzv_configs" in said
        assert not re.search("[0-9a-f]{64}", said)
    wait_until(lambda: not any(map(is_alive, pids)), 2.0)


# Mistakes on the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2", "absent.py"], "there is no script 'absent.py'"),
        (["-n", "0", "train.py"], "'0' is not a number of workers"),
        (["-n", "two", "train.py"], "'two' is not a number of workers"),
        (["train.py"], "-n/--workers"),
        (["-n", "2"], "no script was given"),
        (["-n", "2", "-m"], "no script was given"),
        (["-n", "2", "--nonsense", "train.py"], "--nonsense"),
        (["-n", "2", "--max-restarts", "1", "train.py"], "--max-restarts needs --resume DIR"),
        (["-n", "2", "--max-restarts", "-1", "train.py"], "'-1' is not a number, 0 or more"),
        (["-n", "2", "--log-dir", "/proc/x", "train.py"], "--log-dir '/proc/x' cannot be made"),
        (["--hosts", "absent", "train.py"], "cannot read the hosts file 'absent'"),
        (["-n", "2", "--port", "0", "train.py"], "'0' is not a port"),
        (["-n", "2", "--start-timeout", "no", "train.py"], "'no' is not a number of seconds"),
    ],
)
def test_a_mistake_is_answered_at_once(
    directory: Directory, arguments: list[str], message: str
) -> None:
    directory.write("train.py", "")
    ended = directory.run(*arguments)
    assert ended.code == 2
    assert ended.stderr.startswith("parallax: ")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_command_does_not_import_torch() -> None:
    code = "import sys, parallax.launch.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_help_and_version_are_given() -> None:
    for words in (["--help"], ["run", "--help"], ["check", "--help"], ["export", "--help"]):
        done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert "parallax" in done.stdout


def test_export_refuses_an_unknown_kind_of_file(tmp_path: Path) -> None:
    words = ["export", str(tmp_path), "model.zip"]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "model.zip" in done.stderr
