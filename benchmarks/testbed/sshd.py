"""Secure shell on the hosts: throw-away keys, a real sshd on each, a configuration for clients."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.testbed.namespace import FILES, Namespace, TestbedError, find_program

Access = Literal["key", "password", "off"]
PROGRAMS = {"sshd", "sshd-session", "sshd-auth"}  # newer releases split sshd
PORT = 22
START_SECONDS = 20.0

SERVER = """\
ListenAddress {address}:{port}
HostKey {files}/host_key
AuthorizedKeysFile {authorized}
PermitRootLogin {root}
PasswordAuthentication {password}
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PidFile none
Subsystem sftp internal-sftp
"""

CLIENT = """\
Host {patterns}
    User root
    Port {port}
    IdentityFile {files}/key
    IdentitiesOnly yes
    StrictHostKeyChecking yes
    UserKnownHostsFile {files}/known_hosts
    GlobalKnownHostsFile /dev/null
"""


@dataclass(frozen=True)
class Keys:
    """Texts of two ed25519 pairs: that of clients, and the one that all hosts show."""

    client: str
    client_public: str
    host: str
    host_public: str

    @staticmethod
    def make(where: Namespace) -> Keys:
        texts = [text for name in ("key", "host_key") for text in _make_pair(where, name)]
        return Keys(*texts)


def _make_pair(where: Namespace, name: str) -> tuple[str, str]:
    path = f"{FILES}/{name}"
    where.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", path])
    return where.path(path).read_text(), where.path(f"{path}.pub").read_text()


def write_client(where: Namespace, keys: Keys, addresses: Mapping[str, str]) -> str:
    """What clients on a host need. The configuration also stands for the machine's own there."""
    known = ",".join([*addresses, *addresses.values()])
    where.write("key", keys.client, 0o600)
    where.write("known_hosts", f"{known} {keys.host_public}")
    patterns = known.replace(",", " ")
    return where.write("ssh_config", CLIENT.format(patterns=patterns, port=PORT, files=FILES))


def write_server(where: Namespace, keys: Keys, address: str, access: Access) -> str:
    where.write("host_key", keys.host, 0o600)
    where.write("authorized_keys", keys.client_public)
    by_key = access == "key"
    text = SERVER.format(
        address=address,
        port=PORT,
        files=FILES,
        authorized=f"{FILES}/authorized_keys" if by_key else "none",
        root="prohibit-password" if by_key else "yes",
        password="no" if by_key else "yes",
    )
    return where.write("sshd_config", text)


def start(popen: Callable[..., subprocess.Popen[Any]], config: str) -> subprocess.Popen[Any]:
    program = find_program("sshd")
    assert program is not None, "Testbed.missing() looks for it"
    return popen(
        [program, "-D", "-f", config, "-E", f"{FILES}/sshd.log"],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_listening(where: Namespace, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _listens(where):
        if process.poll() is not None or time.monotonic() > deadline:
            log = where.path(f"{FILES}/sshd.log")
            said = log.read_text() if log.exists() else "it wrote no log"
            raise TestbedError(f"sshd on host {where.name!r} does not listen: {said.strip()}")
        time.sleep(0.005)


def _listens(where: Namespace) -> bool:
    lines = [line.split() for line in where.proc("net/tcp").splitlines()[1:]]
    return any(line[1].endswith(f":{PORT:04X}") and line[3] == "0A" for line in lines)
