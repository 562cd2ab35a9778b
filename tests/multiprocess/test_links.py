"""The link of two hosts, each a network namespace, is measured as fast as it was made."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

RATE_BYTES_PER_SECOND = 200e6 / 8
PAYLOAD = 1448 / 1514  # of a frame with an Ethernet header, as tbf counts it
ADDRESSES = ("10.213.7.1", "10.213.7.2")

LISTEN = """
import sys
from parallax.launch.check.links import Listener
with Listener(sys.argv[1]) as listener:
    print(listener.port, flush=True)
    listener.serve(b"t" * 16, timeout_seconds=20)
"""
MEASURE = """
import dataclasses, json, sys
from parallax.launch.check.links import measure
link = measure(sys.argv[1], int(sys.argv[2]), b"t" * 16)
print(json.dumps(dataclasses.asdict(link)))
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable of 200 Mbit/s between them."""
    names = tuple(f"parallax-{os.getpid()}-{end}" for end in "ab")
    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                run("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr!r}")
            stack.callback(run, "ip", "netns", "delete", name)
        ends = ("type", "veth", "peer", "name", "plx0", "netns")
        run("ip", "-n", names[0], "link", "add", "plx0", *ends, names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "plx0")
            run("ip", "-n", name, "link", "set", "plx0", "up")
            shape = "root tbf rate 200mbit burst 512k latency 100ms".split()
            run("tc", "-n", name, "qdisc", "add", "dev", "plx0", *shape)
        yield names[0], names[1]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="network namespaces need root, ip and tc",
)
def test_a_shaped_link_is_measured_as_fast_as_it_is() -> None:
    with two_hosts() as (here, there):
        python = [sys.executable, "-c"]
        listen = ["ip", "netns", "exec", there, *python, LISTEN, ADDRESSES[1]]
        with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as listener:
            assert listener.stdout is not None
            port = listener.stdout.readline().strip()
            command = ["ip", "netns", "exec", here, *python, MEASURE, ADDRESSES[1], port]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=20)
            assert listener.wait(20) == 0
    link = json.loads(done.stdout)
    assert 0 < link["latency_seconds"] < 0.1
    for direction in ("send", "receive"):
        rate = link[f"{direction}_bytes_per_second"]
        assert rate == pytest.approx(PAYLOAD * RATE_BYTES_PER_SECOND, rel=0.2)
