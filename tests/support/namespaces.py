"""Parts of one machine that look like machines of their own."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import socket
import struct
import subprocess

import pytest

_SET_FLAGS, _UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP
_NEW_UTS = 0x04000000  # CLONE_NEWUTS
_libc = ctypes.CDLL(None, use_errno=True)


def unshared(kind: str) -> list[str]:
    """The beginning of a command that runs in a namespace of its own ("uts" or "net")."""
    prefix = _unshared(kind)
    if prefix is None:
        pytest.skip(f"`unshare --{kind}` is not allowed here: it needs root or user namespaces")
    return prefix


@functools.cache
def _unshared(kind: str) -> list[str] | None:
    for options in ([], ["--user", "--map-root-user"]):
        prefix = ["unshare", *options, f"--{kind}", "--"]
        try:
            if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
                return prefix
        except FileNotFoundError:
            return None
    return None


def rename_host(name: str) -> None:
    """Give this process a host name of its own: it is then a host for Parallax."""
    if _libc.unshare(_NEW_UTS):
        raise OSError(ctypes.get_errno(), "cannot have a host name of its own")
    socket.sethostname(name)


def raise_loopback() -> None:
    """A new network namespace has nothing but a loopback interface, which is down."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
