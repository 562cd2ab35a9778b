"""What an entry of the hosts file may say: each key, and the check of its value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

_MAX_PORT = 65535
_LAUNCHER_VARIABLES = (
    "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
).split()
_UUID = "[0-9A-Fa-f][0-9A-Fa-f-]*"
_DEVICE = re.compile(
    rf"0|[1-9][0-9]{{0,2}}|(GPU|MIG)-{_UUID}|MIG-GPU-{_UUID}/[0-9]{{1,3}}/[0-9]{{1,3}}"
)


class Refusal(Exception):
    """What is wrong with an entry and what to do, without the place where it stands."""


def check(table: Mapping[str, object]) -> dict[str, Any]:
    """The fields of `Host` that the table gives."""
    refuse_unknown(table, KEYS)
    if "workers" in table and "devices" in table:
        raise Refusal(
            "both workers and devices; devices give one worker each, so leave workers out"
        )
    return {KEYS[key][0]: KEYS[key][1](key, value) for key, value in table.items()}


def merge(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A host's own fields before the defaults; the environments together, variable by variable."""
    amounts = ("devices", "num_workers")
    if any(amount in own for amount in amounts):
        defaults = {name: value for name, value in defaults.items() if name not in amounts}
    fields = {**defaults, **own}
    environment = {**defaults.get("environment", {}), **own.get("environment", {})}
    if "CUDA_VISIBLE_DEVICES" in environment and "devices" in fields:
        raise Refusal(
            "both devices and CUDA_VISIBLE_DEVICES in the environment; devices alone is enough"
        )
    return {**fields, "environment": environment}


def refuse_unknown(table: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse a key that is not one of the known."""
    unknown = [shown(key) for key in table if key not in known]
    if unknown:
        raise Refusal(f"unknown key {', '.join(unknown)}; the keys are {', '.join(known)}")


def canonical(name: str) -> str:
    """One spelling for each host: DNS does not tell cases apart, and IPv6 has many forms."""
    address = _ip_address(name)
    return name.lower() if address is None else str(address).lower()


def shown(value: object) -> str:
    """The value as an error shows it: on one line, and not longer than is read."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _name(key: str, value: object) -> str:
    name = _text(key, value)
    address = _ip_address(name)
    if address is not None:
        if address.is_unspecified or address.is_multicast:
            raise Refusal(f"{key} is {shown(name)}, which is not the address of one host")
        return name
    # Digits and dots alone would be taken for an address: 10.1 is 10.0.0.1 to ssh.
    plain = re.fullmatch(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name)
    if plain is None or len(name) > 253 or re.fullmatch(r"[0-9.]+", name):
        apart = " (the user is a key of its own, user)" if "@" in name else ""
        raise Refusal(
            f"{key} is {shown(name)}{apart}; allowed are names of ASCII letters, digits, '.', '_' "
            "and '-' that do not begin with '-' or '.', and IPv4 or IPv6 addresses"
        )
    return name


def _user(key: str, value: object) -> str:
    allowed = "a name of ASCII letters, digits, '.', '_' and '-' that does not begin with '-'"
    return _matching(key, value, r"[A-Za-z0-9_][A-Za-z0-9._-]*", allowed)


def _interface(key: str, value: object) -> str:
    allowed = "one name such as eth0, of at most 15 characters"
    return _matching(key, value, r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,14}", allowed)


def _port(key: str, value: object) -> int:
    if not _is_int(value) or not 1 <= value <= _MAX_PORT:
        raise Refusal(f"{key} is {shown(value)}; allowed is a number from 1 to {_MAX_PORT}")
    return value


def _num_workers(key: str, value: object) -> int:
    if not _is_int(value) or value < 1:
        raise Refusal(
            f"{key} is {shown(value)}; allowed is a number from 1 up "
            "(to leave a host out, put # before its lines)"
        )
    return value


def _devices(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise Refusal(f"{key} is {shown(value)}; allowed is a list such as [0, 1], or no such key")
    devices = tuple(_device(device) for device in value)
    seen: set[str] = set()
    for device in devices:
        if device.lower() in seen:
            raise Refusal(f"the device {device} is there twice; name it once")
        seen.add(device.lower())
    if len({device.isdigit() for device in devices}) > 1:
        raise Refusal(
            f"{key} is {shown(value)}; name the GPUs of a host all by number or all by UUID, "
            "because one that is named both ways would get two workers"
        )
    return devices


def _device(value: object) -> str:
    text = str(value) if _is_int(value) else value
    if not isinstance(text, str) or not _DEVICE.fullmatch(text):
        raise Refusal(
            f"the device {shown(value)} is not understood; allowed are the numbers of GPUs, 0 to "
            "999, with commas between them, and UUIDs that begin with GPU- or MIG-"
        )
    return text


def _python(key: str, value: object) -> str:
    command = _path(key, value)
    if "/" in command and not command.startswith("/"):
        raise Refusal(
            f"{key} is {shown(command)}; allowed are an absolute path and the name of a command"
        )
    return command


def _directory(key: str, value: object) -> str:
    directory = _path(key, value)
    if not directory.startswith("/"):
        raise Refusal(f"{key} is {shown(directory)}; allowed is an absolute path")
    return directory


def _path(key: str, value: object) -> str:
    path = _text(key, value)
    if path.startswith(("~", "$")):
        raise Refusal(
            f"{key} is {shown(path)}, but nothing is expanded in a hosts file; write the whole path"
        )
    if not path.isprintable() or path.startswith("-"):
        raise Refusal(
            f"{key} is {shown(path)}; allowed is a path of printable characters that does not "
            "begin with '-'"
        )
    return path


def _environment(key: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        # Values may be secrets: no error shows them.
        kind = type(value).__name__
        raise Refusal(f'{key} is a {kind}; allowed is a table such as {{ NAME = "value" }}')
    for name, content in value.items():
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise Refusal(
                f"{key} has the variable {shown(name)}; allowed are names of ASCII letters, "
                "digits and '_' that do not begin with a digit"
            )
        if name in _LAUNCHER_VARIABLES:
            raise Refusal(f"{key} has {name}, which the launcher sets itself; take it out")
        if not isinstance(content, str) or "\0" in content:
            raise Refusal(
                f"{key} has something else for {name} than a string, in quotes, without a NUL "
                "character"
            )
    return dict(value)


def _matching(key: str, value: object, pattern: str, allowed: str) -> str:
    text = _text(key, value)
    if not re.fullmatch(pattern, text):
        raise Refusal(f"{key} is {shown(text)}; allowed is {allowed}")
    return text


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise Refusal(f"{key} is {shown(value)}; allowed is a string that is not empty")
    return value


def _ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, or None for a name; the zone of an IPv6 address must be a plain word."""
    if not re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?", name):
        return None
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


KEYS: Mapping[str, tuple[str, Callable[[str, object], object]]] = {
    "host": ("name", _name),
    "address": ("address", _name),
    "user": ("user", _user),
    "port": ("port", _port),
    "workers": ("num_workers", _num_workers),
    "devices": ("devices", _devices),
    "python": ("python", _python),
    "directory": ("directory", _directory),
    "environment": ("environment", _environment),
    "interface": ("interface", _interface),
}
"""Key in the file → the field of `Host` that it gives, and the check of its value."""
