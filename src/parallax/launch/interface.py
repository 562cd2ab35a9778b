"""Network interfaces and their addresses."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
_IPV6_TABLE = "/proc/net/if_inet6"


def addresses() -> list[tuple[str, str]]:
    """(interface, address) of this machine, IPv4 first; empty where there is no way to know."""
    if sys.platform != "linux":
        return []
    return [*_ipv4(), *_ipv6()]


def interface_of(address: str) -> str | None:
    """The interface that has the address."""
    return next((name for name, own in addresses() if _same(own, address)), None)


def address_of(interface: str) -> str | None:
    """The interface's first address."""
    return next((own for name, own in addresses() if name == interface), None)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def source_towards(address: str) -> str:
    """The address from which this machine would reach the other; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def resolve(address: str) -> str:
    """The number behind a name, as this machine sees it."""
    return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])


def _same(one: str, other: str) -> bool:
    try:
        return ipaddress.ip_address(one) == ipaddress.ip_address(other.partition("%")[0])
    except ValueError:
        return False


def _ipv4() -> list[tuple[str, str]]:
    import fcntl  # not on every platform

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has none
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _ipv6() -> list[tuple[str, str]]:
    try:
        with open(_IPV6_TABLE, encoding="ascii") as table:
            lines = [line.split() for line in table]
    except OSError:
        return []
    return [(line[5], str(ipaddress.IPv6Address(int(line[0], 16)))) for line in lines]
