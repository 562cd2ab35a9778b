"""What a host says of itself before a job starts there, and what it finds wrong."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from parallax.launch.host.supervisor import num_cores
from parallax.launch.interface import address_of, addresses, interface_of, is_loopback, resolve
from parallax.launch.job import HostSpec, Program

_SSH_CONNECTION = "SSH_CONNECTION"
_LOOPBACK = "127.0.0.1"
_GPU_SECONDS = 5.0
_PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


class RefusalError(Exception):
    """Why a host cannot take part: a sentence or two, with what to do."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A host that can take part."""

    hostname: str
    python: str
    torch: str | None
    parallax: str
    address: str
    """Where other hosts reach it, as far as it can know."""
    num_cores: int
    time_seconds: float
    script_digest: str | None = None
    interface: str | None = None
    gpus: tuple[str, ...] = ()
    num_free_ports: int | None = None


def gather(spec: HostSpec) -> Facts:
    """Look at this host; raises RefusalError where the job could not run."""
    torch_version = version_of("torch")
    if spec.program is not None and torch_version is None:
        raise RefusalError(f"{sys.executable} has no PyTorch: install torch, or use another python")
    address = _address(spec)
    if spec.port:
        listen(address, spec.port).close()
    return Facts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        torch=torch_version,
        parallax=version_of("parallax-torch") or "unknown",
        address=address,
        interface=interface_of(address),
        num_cores=num_cores(),
        time_seconds=time.time(),
        script_digest=_script_digest(spec),
        # Only a check waits for these.
        gpus=_gpus() if spec.program is None else (),
        num_free_ports=_num_free_ports() if spec.program is None else None,
    )


def enter_directory(spec: HostSpec) -> None:
    if spec.directory is None:
        return
    try:
        os.chdir(spec.directory)
    except OSError as error:
        raise RefusalError(
            f"cannot enter the directory {spec.directory!r}: {error.strerror}. Make it there, or "
            "name another with `directory` in a TOML hosts file"
        ) from None


def listen(address: str, port: int) -> socket.socket:
    """Open a port, on this address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise RefusalError(
            f"cannot listen on {address} port {port}: {error.strerror or error}; give another "
            "--port, or none for any that is free"
        ) from None


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _address(spec: HostSpec) -> str:
    """By the interface that was named, else the address that was, else where ssh came in."""
    if spec.interface is not None:
        found = address_of(spec.interface)
        if found is None and not addresses():
            raise RefusalError(
                "interfaces cannot be looked up there: give its `address` in a TOML hosts file "
                "instead of an interface"
            )
        if found is None:
            raise RefusalError(
                f"there is no interface {spec.interface!r} with an address; there are {_own()}"
            )
        return found
    if spec.address is not None:
        return _named_address(spec.address)
    # On this machine the variable would be that of the user's own login.
    words = os.environ.get(_SSH_CONNECTION, "").split() if spec.is_remote else []
    return words[2] if len(words) == 4 else _LOOPBACK


def _named_address(address: str) -> str:
    try:
        found = resolve(address)
    except OSError as error:
        raise RefusalError(
            f"its address {address!r} is not known there ({error.strerror or error}): give a number"
        ) from None
    if addresses() and interface_of(found) is None:
        raise RefusalError(
            f"its address {address!r} is {found} there, which is none of its own: {_own()}"
        )
    if is_loopback(found) and not is_loopback(address):
        raise RefusalError(
            f"its address {address!r} is {found} there, which other hosts cannot reach: give a "
            f"number. It has {_own()}"
        )
    return found


def _own() -> str:
    return ", ".join(f"{name} {address}" for name, address in addresses()) or "none"


def _script_digest(spec: HostSpec) -> str | None:
    if spec.program is None:
        return None
    program = Program(**spec.program)
    if program.kind == "module":
        return None
    if not os.path.exists(program.name):
        raise RefusalError(f"there is no script {program.name!r} (the directory is {os.getcwd()})")
    if not os.path.isfile(program.name):
        return None
    try:
        with open(program.name, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        raise RefusalError(f"cannot read the script {program.name!r}: {error.strerror}") from None


def _gpus() -> tuple[str, ...]:
    """Their names, as the driver's own tool tells them."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(done.stdout.split("\n")[:-1]) if done.returncode == 0 else ()


def _num_free_ports() -> int | None:
    """Of those that the kernel gives to workers that ask for any."""
    try:
        with open(_PORT_RANGE, encoding="ascii") as file:
            first, last = map(int, file.read().split())
        used = set()
        for table in filter(os.path.exists, _TCP_TABLES):  # IPv6 may be off
            with open(table, encoding="ascii") as file:
                used |= {
                    int(line.split()[1].rpartition(":")[2], 16) for line in file.readlines()[1:]
                }
    except OSError:  # not Linux
        return None
    return last - first + 1 - sum(first <= port <= last for port in used)
