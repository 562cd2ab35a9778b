"""What a test bed needs of the machine, and the reason if it is not there."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from benchmarks.testbed.namespace import UNSHARE, find_program

PACKAGES = {
    "unshare": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
PROBE_SECONDS = 20.0

# What is done later, in namespaces of its own that end with it.
PROBE = """
mount -t tmpfs testbed /run
ip link add switch type bridge
ip link add port type veth peer name eth0
ip link set port master switch
tc qdisc add dev eth0 root tbf rate 1mbit burst 512k latency 100ms
"""


def missing() -> str | None:
    """Why there can be no test bed here, or None."""
    if sys.platform != "linux":
        return f"a test bed needs Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"a test bed needs root, and this is user {os.geteuid()}"
    for program, package in PACKAGES.items():
        if find_program(program) is None:
            return f"a test bed needs {program!r}, of Debian's package {package}"
    return _probe()


@functools.cache
def _probe() -> str | None:
    """Root in a container may still not make namespaces or interfaces: try."""
    try:
        done = subprocess.run(
            [*UNSHARE, "sh", "-ec", PROBE],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a network namespace could not be made in {PROBE_SECONDS:.0f} s"
    if done.returncode != 0:
        return f"a test bed needs namespaces and shaped links: {done.stderr.strip()}"
    return None
