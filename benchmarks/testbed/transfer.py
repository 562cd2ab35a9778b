"""Send bytes from one host to another and time it.

transfer.py receive                          # prints its port, then the bytes that came
transfer.py send ADDRESS PORT BYTES SECONDS  # prints the seconds until all were received
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.testbed.bed import Host, Testbed

BLOCK_BYTES = 1 << 20
TIMEOUT_SECONDS = 120.0
TIMED_OUT = 75  # an exit code


def transfer(
    bed: Testbed,
    source: Host | str,
    target: Host | str,
    size_bytes: int,
    *,
    connect_seconds: float = 10.0,
) -> float:
    """Send `size_bytes` over TCP; returns the seconds. Raises TimeoutError if it cannot connect."""
    receive = [sys.executable, "-I", "-S", __file__, "receive"]
    with bed.popen(receive, target, stdout=subprocess.PIPE, text=True) as receiver:
        try:
            port = receiver.stdout.readline().strip()  # type: ignore[union-attr]
            send = [sys.executable, "-I", "-S", __file__, "send", bed.host(target).address, port]
            send += [str(size_bytes), str(connect_seconds)]
            sent = bed.run(send, source, timeout_seconds=TIMEOUT_SECONDS)
            if sent.returncode == TIMED_OUT:
                raise TimeoutError(f"{source} did not reach {target} in {connect_seconds} s")
            if sent.returncode != 0:
                raise RuntimeError(f"{source} could not send to {target}: {sent.stderr.strip()}")
            received = int(receiver.stdout.readline())  # type: ignore[union-attr]
        finally:
            receiver.kill()
    if received != size_bytes:
        raise RuntimeError(f"{received} of {size_bytes} bytes arrived")
    return float(sent.stdout)


def _receive() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        received = 0
        while block := connection.recv(BLOCK_BYTES):
            received += len(block)
        connection.sendall(b"!")
    print(received, flush=True)


def _send(address: str, port: int, size_bytes: int, connect_seconds: float) -> None:
    block = bytes(BLOCK_BYTES)
    try:
        connection = socket.create_connection((address, port), timeout=connect_seconds)
    except TimeoutError:
        sys.exit(TIMED_OUT)
    with connection:
        connection.settimeout(TIMEOUT_SECONDS)
        start = time.perf_counter()
        for sent in range(0, size_bytes, BLOCK_BYTES):
            connection.sendall(block[: size_bytes - sent])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
    print(time.perf_counter() - start)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive()
    else:
        _send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
