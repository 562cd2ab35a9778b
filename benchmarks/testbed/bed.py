"""The test bed: hosts, the switch between them, secure shell and quotas, brought up and down."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, get_args

from benchmarks.testbed import quota, requirements, sshd
from benchmarks.testbed.namespace import Namespace, TestbedError
from benchmarks.testbed.switch import INTERFACE, Switch, address

MAX_HOSTS = 250
CONTROL_PORT = 254
CONTROL = "control"
# In a shell that becomes the command, so that it and all that it starts are in the group.
JOIN = 'echo 0 > "$0" && exec "$@"'

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """A host of a bed; `pid` is its process 1 as the machine numbers it."""

    name: str
    address: str
    port: int
    namespace: Namespace

    @property
    def pid(self) -> int:
        return self.namespace.pid

    def __str__(self) -> str:
        return self.name


class Counters(NamedTuple):
    """Bytes that passed a host's interface, headers included."""

    sent_bytes: int
    received_bytes: int


class Process(NamedTuple):
    """A process of a host; `pid` is the one by which the machine knows it."""

    pid: int
    argv: list[str]


class Testbed:
    """`num_hosts` hosts with sshd, and one named `control` to start things from.

        with Testbed(3, rate="200mbit", cpus={"b": 0.5}) as bed:
            print(bed.run(["ssh", "a", "hostname"]).stdout)
            bed.cut("c")

    A host has its own network, name, processes, /run, /dev/shm and /etc/hosts; the file system is
    otherwise the machine's. `rate` (as `tc` writes it) shapes its link in both directions, `cpus`
    is the quota of all its processes together. `ssh` is "key" for a host that lets the bed's key
    in, "password" for one that asks for a password that nobody has, "off" for one without sshd.
    Each of the three is one value for all hosts, or a mapping by name, or a sequence.

    Nothing exists before `start` or `with`. Everything ends with `close`, or with the process that
    made the bed, however it ends: see [Note: nothing outside] in the package.
    """

    __test__ = False  # not a test, whatever pytest makes of the name
    interface = INTERFACE
    """The one that every host has to the others."""

    def __init__(
        self,
        num_hosts: int,
        *,
        rate: str | Mapping[str, str] | Sequence[str | None] | None = None,
        cpus: float | Mapping[str, float] | Sequence[float | None] | None = None,
        ssh: sshd.Access | Mapping[str, sshd.Access] | Sequence[sshd.Access | None] = "key",
        names: Sequence[str] | None = None,
    ) -> None:
        self._names = host_names(num_hosts, names)
        self._rates: dict[str, str] = _by_name("rate", rate, self._names)
        self._cpus = _by_name("cpus", cpus, self._names)
        self._ssh = _checked_access(_by_name("ssh", ssh, self._names))
        for value in self._cpus.values():
            quota.microseconds(value)
        self._hosts: list[Host] = []
        self._control: Host | None = None
        self._quotas = quota.Quotas()
        self._machines: list[Namespace] = []
        self._owner = 0

    missing = staticmethod(requirements.missing)

    # Up and down

    def start(self) -> Testbed:
        reason = self.missing()
        if reason is not None:
            raise TestbedError(reason)
        if self._control is not None:
            raise TestbedError("this test bed is up, or was; make another")
        with contextlib.suppress(TestbedError):  # a machine without quotas has nothing to sweep
            quota.sweep()
        self._owner = os.getpid()
        try:
            self._start_hosts()
            self._start_quotas()
            self._start_sshd()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Take everything down; again and again does nothing. Only the maker's process can."""
        if self._owner != os.getpid():
            return
        with contextlib.ExitStack() as steps:  # each is done whatever another raises; last first
            steps.callback(self._quotas.close)
            for machine in self._machines:
                steps.callback(machine.close)
            for machine in self._machines:  # all end side by side
                machine.kill()

    def __enter__(self) -> Testbed:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start_hosts(self) -> None:
        self._start_machines([*self._names, CONTROL, "switch"])
        *hosts, control, switch = self._machines
        self._hosts = [
            Host(machine.name, address(port), port, machine)
            for port, machine in enumerate(hosts, start=1)
        ]
        self._control = Host(CONTROL, address(CONTROL_PORT), CONTROL_PORT, control)
        self._switch = Switch(switch)
        self._switch.connect({host.port: host.namespace for host in self._everywhere()})
        for host in self._everywhere():
            host.namespace.write("hosts", self._hosts_text())
        for name, rate in list(self._rates.items()):
            self.shape(name, rate)

    def _start_machines(self, names: list[str]) -> None:
        owner = os.pidfd_open(self._owner)
        try:
            for name in names:
                self._machines.append(Namespace(name, owner))
        finally:
            os.close(owner)
        for machine in self._machines:
            machine.wait_ready()

    def _start_quotas(self) -> None:
        for name, cpus in self._cpus.items():
            self._quotas.add_host(name, cpus)

    def _start_sshd(self) -> None:
        keys = sshd.Keys.make(self.control.namespace)
        addresses = {host.name: host.address for host in self._hosts}
        for host in self._everywhere():
            self._ssh_config = sshd.write_client(host.namespace, keys, addresses)
        starting = []
        for host in self._hosts:
            access = self._ssh.get(host.name, "key")
            if access != "off":
                config = sshd.write_server(host.namespace, keys, host.address, access)
                popen = functools.partial(self.popen, host=host)
                starting.append((host.namespace, sshd.start(popen, config)))
        for namespace, process in starting:
            sshd.wait_listening(namespace, process)

    def _hosts_text(self) -> str:
        lines = [f"{host.address} {host.name}" for host in self._everywhere()]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    # What there is

    def rate(self, host: Host | str) -> str | None:
        return self._rates.get(str(host))

    def cpus(self, host: Host | str) -> float | None:
        return self._cpus.get(str(host))

    @property
    def hosts(self) -> list[Host]:
        return list(self._hosts)

    @property
    def control(self) -> Host:
        if self._control is None:
            raise TestbedError("this test bed is not up; use `with Testbed(...) as bed`")
        return self._control

    @property
    def ssh_config(self) -> str:
        """Its path on control and on every host, where `ssh` also takes it by itself."""
        return self._ssh_config

    def host(self, host: Host | str) -> Host:
        for known in self._everywhere():
            if host in (known, known.name):
                return known
        raise ValueError(f"host={str(host)!r} is none of {[h.name for h in self._everywhere()]}")

    def counters(self, host: Host | str) -> Counters:
        for line in self.host(host).namespace.proc("net/dev").splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == INTERFACE:
                columns = figures.split()
                return Counters(int(columns[8]), int(columns[0]))
        raise TestbedError(f"host {str(host)!r} has no interface {INTERFACE}")

    def processes(self, host: Host | str) -> list[Process]:
        """Those running on a host, without its process 1 and all processes of sshd itself."""
        found = self.host(host)
        return [
            Process(pid, argv)
            for pid, argv in _processes_in(_pid_namespace(found.pid))
            if pid != found.pid and not _is_sshd(pid)
        ]

    def write_hosts_file(
        self,
        path: Path | str,
        *,
        workers: int = 1,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """A hosts file for `parallax run --hosts`, with all hosts but control."""
        lines = []
        for host in self._hosts:
            lines += ["[[hosts]]", f"host = {json.dumps(host.name)}"]
            lines += [f"address = {json.dumps(host.address)}", f"workers = {workers}"]
            lines += [f"python = {json.dumps(python)}"]
            if environment:
                pairs = [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in environment.items()]
                lines += [f"environment = {{ {', '.join(pairs)} }}"]
            lines += [""]
        Path(path).write_text("\n".join(lines))

    # What can be done

    def popen(
        self, argv: Sequence[str], host: Host | str = CONTROL, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host; `options` are those of subprocess.Popen.

        It is a child of this process: signals reach the command itself. It ends with the bed.
        """
        found = self.host(host)
        entrance = self._quotas.entrance(found.name)
        if entrance is not None:
            argv = ["sh", "-c", JOIN, str(entrance), *argv]
        return found.namespace.popen(argv, **options)

    def run(
        self,
        argv: Sequence[str],
        host: Host | str = CONTROL,
        *,
        timeout_seconds: float = 60.0,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; its exit code and output are in the result."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(argv, host, **{**pipes, "text": True, **options}) as process:
            try:
                out, err = process.communicate(timeout=timeout_seconds)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def shape(self, host: Host | str, rate: str) -> None:
        """Give a host's link another rate, in both directions."""
        self._switch.shape(self.host(host).port, rate)
        self._rates[str(host)] = rate

    def cut(self, host: Host | str) -> None:
        """Lose everything from and to a host, without a sign of it at either end."""
        self._switch.forward(self.host(host).port, False)

    def mend(self, host: Host | str) -> None:
        """Undo `cut`."""
        self._switch.forward(self.host(host).port, True)

    def limit(self, pid: int, cpus: float) -> None:
        """Give a process of a host, and those it will start, a CPU quota within the host's."""
        try:
            namespace = _pid_namespace(pid)
        except OSError:
            namespace = -1
        for host in self._everywhere():
            if namespace == _pid_namespace(host.pid):
                return self._quotas.limit(host.name, pid, cpus)
        raise ValueError(f"pid={pid} is no process of this test bed; see processes(host)")

    def _everywhere(self) -> list[Host]:
        return [*self._hosts, self.control]


def host_names(num_hosts: int, names: Sequence[str] | None = None) -> list[str]:
    """The names as given, or a, b, c, …"""
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise ValueError(f"num_hosts={num_hosts}: a test bed has 1 to {MAX_HOSTS} hosts")
    chosen = list(names) if names is not None else list(_letters(num_hosts))
    if len(chosen) != num_hosts or len(set(chosen)) != num_hosts:
        raise ValueError(f"names={chosen}: {num_hosts} different names are needed")
    for name in chosen:
        if name in (CONTROL, "switch", "localhost") or not re.fullmatch(
            r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name
        ):
            raise ValueError(f"names: {name!r} cannot be a host's name here")
    return chosen


def _checked_access(given: dict[str, sshd.Access]) -> dict[str, sshd.Access]:
    for name, access in given.items():
        if access not in get_args(sshd.Access):
            raise ValueError(f"ssh={access!r} of host {name!r} is none of {get_args(sshd.Access)}")
    return given


def _letters(count: int) -> Iterator[str]:
    """a, b, … z, aa, ab, …"""
    letters = string.ascii_lowercase
    pairs = ("".join(pair) for pair in itertools.product(letters, repeat=2))
    return itertools.islice(itertools.chain(letters, pairs), count)


def _by_name(
    option: str, value: T | Mapping[str, T] | Sequence[T | None] | None, names: list[str]
) -> dict[str, T]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - set(names))
        if unknown:
            raise ValueError(f"{option}: there is no host {unknown[0]!r}, only {names}")
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != len(names):
            raise ValueError(f"{option}: {len(value)} values for {len(names)} hosts")
        return {name: item for name, item in zip(names, value, strict=True) if item is not None}
    return dict.fromkeys(names, value)


def _pid_namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def _processes_in(namespace: int) -> Iterator[tuple[int, list[str]]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        # It may end while it is looked at, or be none that we may look at, so none of ours. One
        # that ended but was not reaped has no argv.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if _pid_namespace(int(name)) == namespace:
                argv = Path(f"/proc/{name}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                if argv != [b""]:
                    yield int(name), [os.fsdecode(word) for word in argv]


def _is_sshd(pid: int) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name in sshd.PROGRAMS
    except (FileNotFoundError, ProcessLookupError):
        return False
