"""Interfaces and addresses of this machine."""

from __future__ import annotations

import socket
import sys

import pytest

from parallax.launch.interface import (
    address_of,
    addresses,
    interface_of,
    is_loopback,
    resolve,
    source_towards,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found on Linux")


def test_loopback_is_found_both_ways() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert address_of("lo") == "127.0.0.1"
    assert ("lo", "127.0.0.1") in addresses()


def test_what_is_not_there_is_not_found() -> None:
    assert interface_of("192.0.2.1") is None
    assert interface_of("no address") is None
    assert address_of("nonesuch0") is None


def test_every_address_can_be_bound() -> None:
    for _, address in addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if not address.startswith("fe80"):  # needs its interface named
            with socket.create_server((address, 0), family=family):
                pass


def test_loopback_is_told_from_the_rest() -> None:
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("localhost.example.com")


def test_the_way_to_a_loopback_address_starts_at_one() -> None:
    assert source_towards("127.0.0.1") == "127.0.0.1"
    assert resolve("127.0.0.1") == "127.0.0.1"
