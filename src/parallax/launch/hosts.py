"""The hosts file: on which machines the workers of a job run, and how to reach them.

Two formats. The short one has a host a line, with the GPUs to use where not all are:

    node1: 0,1,2,3      # a comment
    ubuntu@node2: 0,1
    [fd00::7]

The other is TOML and can say more. `[defaults]` holds for every host that does not say otherwise:

    [defaults]
    python = "/opt/venv/bin/python"

    [[hosts]]
    host = "node1"
    address = "10.0.0.1"
    devices = [0, 1]

A hosts file is data: nothing in it is run, expanded or given to a shell.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallax.errors import ConfigError, HostsFileError
from parallax.launch.hostfields import Refusal, canonical, check, merge, refuse_unknown, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_FILE_BYTES = 1 << 20
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SHORT_FORMAT = "a line is `HOST` or `HOST: 0,1`, and TOML can say more"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One entry of the hosts file."""

    name: str
    """What ssh is given: a host name, an alias of the ssh configuration, or an IP address."""
    address: str | None = None
    """How the other hosts reach it, where that is not `name`."""
    user: str | None = None
    port: int | None = None
    """The port of its ssh server."""
    num_workers: int | None = None
    devices: tuple[str, ...] = ()
    """The GPUs to use, one worker each: their numbers, or their UUIDs (also of MIG slices)."""
    python: str | None = None
    """The interpreter: an absolute path, or a command to be found there."""
    directory: str | None = None
    """Where the workers start: an absolute path."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    interface: str | None = None
    """The network interface that workers exchange over."""


def read_hosts(path: str | Path) -> tuple[Host, ...]:
    """The hosts of the file, in its order."""
    text = _read_text(path)
    is_toml = str(path).endswith(".toml") or _looks_like_toml(text)
    places: dict[str, str] = {}
    hosts = []
    for where, host in _toml_hosts(path, text) if is_toml else _line_hosts(path, text):
        name = canonical(host.name)
        if name in places:
            raise HostsFileError(
                f"{path}, {where}: the host {host.name!r} is there already ({places[name]}); name "
                "each host once, by aliases of the ssh configuration if one machine is several"
            )
        places[name] = where
        hosts.append(host)
    if not hosts:
        form = 'a host is `[[hosts]]` and `host = "node1"`' if is_toml else _SHORT_FORMAT
        raise HostsFileError(f"{path} names no host: {form}")
    return tuple(hosts)


def workers_of(hosts: Sequence[Host], n: int | None = None) -> tuple[int, ...]:
    """How many workers each host gets.

    A host with devices gets one worker a device; a host with a number of workers gets that many;
    any other gets `n`, the option -n of the command, or one. An `n` that no host would heed is
    an error, because whoever gave it expects something else than what would run.
    """
    if n is not None and n < 1:
        raise ConfigError(f"-n is {n}, but a host needs at least 1 worker")
    open_hosts = [host for host in hosts if not host.devices and host.num_workers is None]
    if n is not None and not open_hosts:
        raise ConfigError(
            f"-n {n} would change nothing: every host of the hosts file has its own workers or "
            "devices; leave -n out, or take these out of the file"
        )
    return tuple(len(host.devices) or host.num_workers or n or 1 for host in hosts)


def is_local(host: Host) -> bool:
    """Whether the host is this machine, so that no ssh is needed.

    A host with a user or port of its own is reached by ssh, also here. Names are only compared:
    nothing is looked up, and an alias for this machine counts as another one.
    """
    if host.user is not None or host.port is not None:
        return False
    hostname = socket.gethostname().lower()
    names = {*_LOCAL_NAMES, hostname, hostname.split(".")[0]}
    return canonical(host.name) in names


def _read_text(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise HostsFileError(f"{path} is a directory; give a hosts file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise HostsFileError(f"cannot read the hosts file {str(path)!r}: {reason}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise HostsFileError(f"{path} has more than {_MAX_FILE_BYTES} bytes: not a hosts file")
    try:
        text = data.decode("utf-8-sig")
        wrong = data.find(b"\0")
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong >= 0:
        line = data.count(b"\n", 0, wrong) + 1
        raise HostsFileError(
            f"{path}, line {line}: the byte {data[wrong]:#04x} is no text in UTF-8; "
            "save the file as UTF-8"
        )
    return text


def _looks_like_toml(text: str) -> bool:
    """By the first line that says something; `[fd00::7]` is a host, `[defaults]` is not."""
    lines = (line.split("#", 1)[0].strip() for line in text.split("\n"))
    first = next((line for line in lines if line), "")
    return re.match(r"\[\[|\[\s*defaults\b|(hosts|defaults)\s*=", first) is not None


def _line_hosts(path: str | Path, text: str) -> Iterator[tuple[str, Host]]:
    """Where each host stands, and the host."""
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.split("#", 1)[0].strip(" \t\r")
        if content:
            with _placed(path, f"line {number}"):
                host = Host(**check(_line_table(content)))
            yield f"line {number}", host


def _line_table(content: str) -> dict[str, object]:
    """The line as a table of TOML would say it."""
    user, at, rest = content.rpartition("@")
    name, devices = _split_ipv6(rest) if rest.startswith("[") else _split_name(rest)
    if re.search(r"\s", name):
        raise Refusal(f"{shown(content)} is not understood: {_SHORT_FORMAT}")
    table: dict[str, object] = {"host": name}
    if at:
        table["user"] = user
    if devices:
        table["devices"] = [device.strip(" \t") for device in devices.split(",")]
    return table


def _split_name(text: str) -> tuple[str, str]:
    name, _, devices = text.partition(":")
    if ":" in devices:
        raise Refusal(
            f"{shown(text)} has more than one ':'; put an IPv6 address into brackets, as in "
            "`[fd00::7]: 0,1`"
        )
    return name.rstrip(" \t"), devices.strip(" \t")


def _split_ipv6(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"\[([^\]]*:[^\]]*)\][ \t]*(?::(.*))?", text)
    if match is None:
        raise Refusal(f"{shown(text)} is not `[fd00::7]` or `[fd00::7]: 0,1`")
    return match[1], (match[2] or "").strip(" \t")


def _toml_hosts(path: str | Path, text: str) -> Iterator[tuple[str, Host]]:
    """Where each host stands, and the host."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise HostsFileError(
            f"{path} is not valid TOML: {error} (a file of lines `HOST: 0,1` must not be called "
            ".toml)"
        ) from None
    with _placed(path, "top level"):
        refuse_unknown(document, ("hosts", "defaults"))
        tables = document.get("hosts", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise Refusal(f"hosts is {shown(tables)}; write a table [[hosts]] for each host")
    with _placed(path, "[defaults]"):
        defaults = _defaults(document.get("defaults", {}))
    for number, table in enumerate(tables, start=1):
        where = f"[[hosts]] {number}"
        if isinstance(table.get("host"), str):
            where += f" ({shown(table['host'])})"
        with _placed(path, where):
            if "host" not in table:
                raise Refusal('the key host is missing; write host = "node1"')
            host = Host(**merge(defaults, check(table)))
        yield where, host


def _defaults(table: object) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise Refusal(f"defaults is {shown(table)}; write a table [defaults]")
    for key in ("host", "address"):
        if key in table:
            raise Refusal(f"{key} belongs to one host; write it into its [[hosts]]")
    return check(table)


@contextmanager
def _placed(path: str | Path, where: str) -> Iterator[None]:
    """Add to a refusal where in the file it arose."""
    try:
        yield
    except Refusal as refusal:
        raise HostsFileError(f"{path}, {where}: {refusal}") from None
