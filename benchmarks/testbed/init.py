"""Process 1 of a host: makes the host's own mounts, then reaps orphans until the bed's maker ends.

    init.py NAME OWNER

OWNER is a descriptor (a pidfd) of the process that made the bed. It is watched instead of asking
for a signal at the parent's death, which the kernel sends already when the parent's thread ends.
When process 1 of a pid namespace ends, the kernel kills all others in it.

Runs as a file, without site-packages, because every host waits for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

FILES = Path("/run/testbed")  # in the host's own memory: keys and files that stand for /etc's
REPLACED = {"hosts": "/etc/hosts", "ssh_config": "/etc/ssh/ssh_config"}


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def make_mounts() -> None:
    """All else is the machine's own file system, so one virtualenv serves every host."""
    mount("-t", "tmpfs", "-o", "mode=755", "testbed", "/run")
    FILES.mkdir(mode=0o700)
    Path("/run/sshd").mkdir(mode=0o755)
    mount("-t", "tmpfs", "testbed", "/dev/shm")
    mount_sys()
    mount("-t", "proc", "proc", "/proc")
    for name, path in REPLACED.items():
        (FILES / name).touch(mode=0o644)
        if Path(path).exists():
            mount("--bind", str(FILES / name), path)


def mount_sys() -> None:
    """/sys shows the interfaces of the network that mounts it; cgroups stay the machine's."""
    sys_new = FILES / "sys"
    sys_new.mkdir()
    mount("-t", "sysfs", "sysfs", str(sys_new))
    mount("--rbind", "/sys/fs/cgroup", str(sys_new / "fs/cgroup"))
    mount("--move", str(sys_new), "/sys")


def disable_ipv6() -> None:
    """Its neighbour discovery would be in the byte counters."""
    for kind in ("all", "default"):
        with contextlib.suppress(FileNotFoundError):
            Path(f"/proc/sys/net/ipv6/conf/{kind}/disable_ipv6").write_text("1")


def reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    name, owner = sys.argv[1], int(sys.argv[2])
    # Still the machine's /proc, so this is the pid by which the machine knows this process.
    pid = os.readlink("/proc/self")
    make_mounts()
    disable_ipv6()
    socket.sethostname(name)
    print("ready", pid, flush=True)
    signal.signal(signal.SIGCHLD, reap)
    # A signal just before `select` waits would leave its child for later: look every second.
    while not select.select([owner], [], [], 1.0)[0]:
        reap()


if __name__ == "__main__":
    main()
