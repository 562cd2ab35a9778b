"""The test bed: hosts as namespaces, what they share and what not, and that nothing stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import Testbed, TestbedError, quota
from benchmarks.testbed.transfer import transfer

ROOT = Path(__file__).parents[2]
REASON = Testbed.missing()

pytestmark = pytest.mark.timeout(60)
needs_bed = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def links() -> str:
    return subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True).stdout


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.02)
    return False


def runs(bed: Testbed, host: str, argv: list[str]) -> bool:
    return argv in [process.argv for process in bed.processes(host)]


def quotas_work() -> bool:
    try:
        quota.Controller.find().check()
    except TestbedError:
        return False
    return True


needs_quotas = pytest.mark.skipif(not quotas_work(), reason="no cgroup with the cpu controller")


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    before = links()
    with Testbed(3, rate={"a": "200mbit"}, names=["a", "b", "far-host"]) as bed:
        yield bed
        assert links() == before
    assert links() == before
    assert not any(Path(f"/proc/{host.pid}").exists() for host in [*bed.hosts, bed.control])


@contextmanager
def running(
    bed: Testbed, argv: list[str], host: str = "control", **options: Any
) -> Iterator[subprocess.Popen[str]]:
    with bed.popen(argv, host, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@needs_bed
def test_secure_shell_reaches_every_host(bed: Testbed) -> None:
    for host in bed.hosts:
        done = bed.run(["ssh", "-F", bed.ssh_config, "-o", "BatchMode=yes", host.name, "hostname"])
        assert (done.returncode, done.stdout.strip()) == (0, host.name), done.stderr
    # Also without being told of the configuration, by address, and from a host to another.
    assert bed.run(["ssh", bed.hosts[1].address, "hostname"]).stdout == "b\n"
    assert bed.run(["ssh", "a", "ssh", "far-host", "hostname"]).stdout == "far-host\n"


@needs_bed
def test_names_resolve_and_the_file_system_is_shared(bed: Testbed, tmp_path: Path) -> None:
    code = (
        "import socket, sys; print(*map(socket.gethostbyname, sys.argv[1:]), file=open('o', 'w'))"
    )
    names = [host.name for host in [*bed.hosts, bed.control]]
    done = bed.run([sys.executable, "-c", code, *names], "b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "o").read_text().split()
    assert found == [host.address for host in [*bed.hosts, bed.control]]
    assert bed.run(["ls", "/sys/class/net"], "a").stdout.split() == ["eth0", "lo"]
    assert socket.gethostname() not in names


@needs_bed
def test_counters_see_a_transfer(bed: Testbed) -> None:
    size_bytes = 4_000_000
    before = {host.name: bed.counters(host) for host in bed.hosts}
    transfer(bed, "a", "b", size_bytes)
    after = {host.name: bed.counters(host) for host in bed.hosts}
    sent = after["a"].sent_bytes - before["a"].sent_bytes
    received = after["b"].received_bytes - before["b"].received_bytes
    assert sent == pytest.approx(size_bytes, rel=0.05)
    assert received == pytest.approx(size_bytes, rel=0.05)
    assert after["far-host"] == before["far-host"]


@needs_bed
def test_a_link_is_shaped_in_both_directions(bed: Testbed) -> None:
    # 24 Mbit and 4 Mbit of burst at 200 Mbit/s: 0.1 s at the least, and 0.01 s without a limit.
    assert transfer(bed, "a", "b", 3_000_000) > 0.09
    assert transfer(bed, "b", "a", 3_000_000) > 0.09


TALK = """
import socket, sys
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
for word in iter(lambda: connection.recv(9), b""):
    print(word.decode(), flush=True)
print("closed", flush=True)
"""
SAY = """
import socket, sys
connection = socket.create_connection(("b", 7000))
for line in sys.stdin:
    connection.sendall(line.strip().encode())
    print("sent", flush=True)
"""


@needs_bed
def test_a_cut_is_silent_and_can_be_mended(bed: Testbed) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running(bed, [sys.executable, "-c", TALK], "b", **pipes) as listener:
        assert listener.stdout.readline() == "listening\n"
        with running(bed, [sys.executable, "-c", SAY], **pipes) as speaker:

            def say(word: str) -> None:
                print(word, file=speaker.stdin, flush=True)
                assert speaker.stdout.readline() == "sent\n"

            say("before")
            assert listener.stdout.readline() == "before\n"
            bed.cut("b")
            received = bed.counters("b").received_bytes
            say("lost")
            # Longer than the kernel looks for a neighbour before it says "no route to host".
            with pytest.raises(TimeoutError):
                transfer(bed, "a", "b", 1000, connect_seconds=4.0)
            assert bed.counters("b").received_bytes == received
            assert "LOWER_UP" in bed.run(["ip", "link", "show", "eth0"], "b").stdout
            assert speaker.poll() is listener.poll() is None
            bed.mend("b")
            assert listener.stdout.readline() == "lost\n"  # TCP sends it again
            speaker.stdin.close()
            assert listener.stdout.readline() == "closed\n"


@needs_bed
def test_processes_of_a_host_are_seen_and_signals_reach_them(bed: Testbed) -> None:
    with (
        running(bed, ["sleep", "300"], "a") as direct,
        running(bed, ["ssh", "a", "sleep 301; true"]) as over_ssh,
    ):
        assert eventually(lambda: runs(bed, "a", ["sleep", "301"]))
        assert (direct.pid, ["sleep", "300"]) in bed.processes("a")
        assert not any("sshd" in argv[0] for _, argv in bed.processes("a"))
        assert not any("sleep" in argv[0] for _, argv in bed.processes("b"))
        direct.send_signal(signal.SIGTERM)
        assert direct.wait(10) == -signal.SIGTERM
        for pid, _ in bed.processes("a"):
            os.kill(pid, signal.SIGKILL)
        assert over_ssh.wait(10) != 0
        assert eventually(lambda: bed.processes("a") == [])


@needs_bed
def test_orphans_are_reaped(bed: Testbed) -> None:
    bed.run(["sh", "-c", "(sleep 0.1; exit) >/dev/null 2>&1 &"], "b")
    children = Path(f"/proc/{bed.host('b').pid}/task/{bed.host('b').pid}/children")
    assert eventually(lambda: children.read_text() == "")


@needs_bed
def test_the_hosts_file_names_every_host(bed: Testbed, tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib")
    bed.write_hosts_file(tmp_path / "h.toml", workers=2, environment={"A B": 'quo"te'})
    hosts = tomllib.loads((tmp_path / "h.toml").read_text())["hosts"]
    assert [host["host"] for host in hosts] == ["a", "b", "far-host"]
    assert hosts[0] == {
        "host": "a",
        "address": bed.hosts[0].address,
        "workers": 2,
        "python": sys.executable,
        "environment": {"A B": 'quo"te'},
    }


@needs_bed
def test_hosts_that_let_nobody_in() -> None:
    with Testbed(2, ssh={"a": "off", "b": "password"}) as bed:
        refused = bed.run(["ssh", "a", "true"])
        assert refused.returncode == 255
        assert "Connection refused" in refused.stderr
        denied = bed.run(["ssh", "-o", "BatchMode=yes", "b", "true"])
        assert denied.returncode == 255
        assert "Permission denied (publickey,password)" in denied.stderr


@needs_bed
@needs_quotas
def test_quotas_of_hosts_and_workers() -> None:
    controller = quota.Controller.find()
    read = (
        (lambda group: (group / "cpu.max").read_text().split()[0])
        if controller.version == 2
        else (lambda group: (group / "cpu.cfs_quota_us").read_text().strip())
    )
    with Testbed(2, cpus={"a": 0.5}) as bed:
        group = bed._quotas.group
        assert read(group / "a") == "5000"
        worker = bed.popen(["sleep", "300"], "a")
        over_ssh = bed.popen(["ssh", "a", "sleep 301; true"])
        assert eventually(lambda: runs(bed, "a", ["sleep", "300"]))
        assert eventually(lambda: runs(bed, "a", ["sleep", "301"]))
        inside = (group / "a/rest/cgroup.procs").read_text().split()
        assert {str(pid) for pid, _ in bed.processes("a")} <= set(inside)
        bed.limit(worker.pid, 0.25)
        own = group / f"a/worker-{worker.pid}"
        assert read(own) == "2500"
        assert (own / "cgroup.procs").read_text().split() == [str(worker.pid)]
        bed.limit(bed.popen(["sleep", "300"], "b").pid, 1.5)  # a host without a quota
        with pytest.raises(ValueError, match="more than the 0.5 of host 'a'"):
            bed.limit(worker.pid, 0.75)
        with pytest.raises(ValueError, match="no process of this test bed"):
            bed.limit(os.getpid(), 0.5)
    assert not group.exists()
    assert over_ssh.poll() is not None
    assert worker.poll() == -signal.SIGKILL


CRASH = """
import time
from benchmarks.testbed import Testbed
bed = Testbed(2, cpus={cpus}).start()
running = bed.popen(["sleep", "299"], "a"), bed.popen(["ssh", "b", "sleep 299"])
while not bed.processes("b"):
    time.sleep(0.01)
pids = [host.pid for host in [*bed.hosts, bed.control]]
print(*pids, *[pid for host in bed.hosts for pid, _ in bed.processes(host)], flush=True)
time.sleep(300)
"""


@needs_bed
def test_a_crash_leaves_nothing() -> None:
    before = links()
    code = CRASH.format(cpus=0.5 if quotas_work() else None)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as maker:
        try:
            pids = maker.stdout.readline().split()
        finally:
            maker.kill()
    assert len(pids) >= 5
    assert eventually(lambda: not any(Path(f"/proc/{int(pid)}").exists() for pid in pids))
    assert links() == before
    if quotas_work():
        root = quota.Controller.find().root
        assert list(root.glob(f"{quota.PREFIX}-{maker.pid}-*"))
        with Testbed(1):
            assert not list(root.glob(f"{quota.PREFIX}-{maker.pid}-*"))


@needs_bed
@needs_quotas
def test_the_sweep_leaves_what_is_in_use_or_another_s() -> None:
    root = quota.Controller.find().root
    # No process with this pid started at time 0, so the maker of these is gone.
    gone, busy = (root / f"{quota.PREFIX}-{os.getpid()}-0-{n}" for n in (1, 2))
    others = [root / f"{quota.PREFIX}-{os.getpid()}-0-x", root / f"{quota.PREFIX}-mine"]
    with Testbed(1, cpus=0.5) as bed, running(bed, ["sleep", "300"]) as process:
        try:
            for group in [gone, busy, *others]:
                group.mkdir()
            (busy / "cgroup.procs").write_text(str(process.pid))
            assert quota.sweep() == [gone]
            assert all(group.exists() for group in [busy, *others, bed._quotas.group])
        finally:
            process.kill()
            process.wait()
            for group in [busy, *others]:
                assert eventually(lambda group=group: removed(group))
    assert not gone.exists()


def removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@needs_bed
def test_a_closed_bed_says_so() -> None:
    bed = Testbed(1)
    bed.close()
    with pytest.raises(TestbedError, match="not up"):
        bed.run(["true"])
    with bed:
        bed.close()
        bed.close()
        with pytest.raises(TestbedError, match="'control' is not up"):
            bed.run(["true"])
    with pytest.raises(TestbedError, match="make another"):
        bed.start()


@needs_bed
def test_a_failed_start_leaves_nothing() -> None:
    bed = Testbed(2, rate={"b": "fast"})
    with pytest.raises(TestbedError, match=r"tc .*fast.* on 'b' failed"):
        bed.start()
    assert not any(Path(f"/proc/{host.pid}").exists() for host in bed.hosts)


@needs_bed
def test_the_command_line(tmp_path: Path) -> None:
    command = "ssh b 'echo on $(hostname)' && grep -c address $PARALLAX_TESTBED_HOSTS && exit 7"
    bring_up = [sys.executable, "-m", "benchmarks.testbed", "--hosts", "2", "--rate", "b=1gbit"]
    done = subprocess.run(
        [*bring_up, "--", "sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7, done.stderr
    assert "10.83.0.2      1gbit" in done.stdout
    assert "on b\n2\n" in done.stdout
    assert "received bytes" in done.stdout
    wrong = subprocess.run([*bring_up, "--cpus", "x=1"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr == "testbed: cpus: there is no host 'x', only ['a', 'b']\n"


@needs_bed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_line_ends_cleanly_by_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "benchmarks.testbed", "--hosts", "1", "--"]
    with subprocess.Popen(
        [*command, "sh", "-c", "echo started; exec sleep 300"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert any(line == "started\n" for line in process.stdout)
            # Ctrl-C goes to all in the foreground, as a terminal sends it.
            os.killpg(process.pid, number) if number == signal.SIGINT else process.terminate()
            assert process.wait(15) == 128 + number
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_others_than_root_are_told() -> None:
    code = "import os; from benchmarks.testbed import Testbed; os.setuid(65534); "
    code += "print(Testbed.missing())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "a test bed needs root, and this is user 65534\n", done.stderr


def test_mistakes_are_named() -> None:
    for options, said in [
        ({"num_hosts": 0}, "num_hosts=0"),
        ({"num_hosts": 2, "names": ["a", "a"]}, "2 different names"),
        ({"num_hosts": 1, "names": ["control"]}, "'control' cannot be"),
        ({"num_hosts": 2, "cpus": [1.0]}, "1 values for 2 hosts"),
        ({"num_hosts": 2, "cpus": 0.001}, "cpus=0.001"),
        ({"num_hosts": 2, "rate": {"c": "1mbit"}}, "no host 'c'"),
        ({"num_hosts": 2, "ssh": "maybe"}, "ssh='maybe'"),
    ]:
        with pytest.raises(ValueError, match=said):
            Testbed(**options)


def test_quotas_of_cgroup_version_2(tmp_path: Path) -> None:
    """The files that are written, in a folder that stands for a machine's."""
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    controller = quota.Controller(tmp_path, 2)
    with pytest.raises(TestbedError, match="echo \\+cpu"):
        quota.Quotas(controller).add_host("a", 0.5)
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
    quotas = quota.Quotas(controller)
    quotas.add_host("a", 0.5)
    quotas.limit("a", 12, 0.05)
    assert (quotas.group / "cgroup.subtree_control").read_text() == "+cpu"
    assert (quotas.group / "a/cgroup.subtree_control").read_text() == "+cpu"
    assert (quotas.group / "a/cpu.max").read_text() == "5000 10000"
    assert (quotas.group / "a/worker-12/cpu.max").read_text() == "5000 100000"
    assert (quotas.group / "a/worker-12/cgroup.procs").read_text() == "12"
