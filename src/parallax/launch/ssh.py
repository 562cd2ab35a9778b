"""How a host is reached: the system's ssh, or a child process where it is this machine."""

from __future__ import annotations

import shlex
import subprocess
import sys

from parallax.launch.hosts import Host, is_local

CONNECT_SECONDS = 10
_ALIVE_SECONDS = 3
_ALIVE_COUNT = 3
_SSH_FAILED = 255
_NO_COMMAND = (126, 127)
_SHOWN_CHARACTERS = 600

# Sent to every host. It reads one line, the host's part of the job, and goes on with the package:
# so no path, argument or value of the job is ever in a command that a shell reads. (No quotes in
# it but double ones: it stands between single ones.)
_BOOTSTRAP = (
    'import sys; "" in sys.path[:1] and sys.path.pop(0); import json, os; '
    'spec = json.loads(open(0, "rb", buffering=0, closefd=False).readline()); '
    'os.environ.update(spec["environment"]); '
    'sys.path[:0] = filter(None, spec["environment"].get("PYTHONPATH", "").split(os.pathsep)); '
    "from parallax.launch.host.process import main; sys.exit(main(spec))"
)

# What ssh says → what to do about it.
_REMEDIES = (
    ("could not resolve", "its name is not known here: check it in the hosts file, or give the "
     "host's address in ~/.ssh/config"),
    ("connection refused", "nothing answers there: is sshd running, and is the port right?"),
    ("permission denied", "it wants a password or another key, and nobody is asked while a job "
     "starts: make `ssh {name}` work without a question (ssh-copy-id {name})"),
    ("too many authentication failures", "offer it the one right key: IdentitiesOnly and "
     "IdentityFile in ~/.ssh/config"),
    ("host key verification failed", "its key is not known here, or has changed: run "
     "`ssh {name}` once by hand and look"),
    ("timed out", "no answer came: is it on, and does a firewall let ssh through?"),
    ("no route to host", "there is no way to it from here: is it on the same network?"),
    ("network is unreachable", "there is no way to it from here: is this machine connected?"),
)  # fmt: skip


def command_for(host: Host, ssh_config: str | None) -> list[str]:
    """The command that starts the host process; it takes no input but its own messages."""
    if is_local(host):
        return [host.python or sys.executable, "-c", _BOOTSTRAP]
    remote = f"exec {shlex.quote(python_of(host))} -c {shlex.quote(_BOOTSTRAP)}"
    return [
        "ssh",
        *(() if ssh_config is None else ("-F", ssh_config)),
        "-T",
        "-x",
        *_options(
            BatchMode="yes",
            ConnectTimeout=str(CONNECT_SECONDS),
            ServerAliveInterval=str(_ALIVE_SECONDS),
            ServerAliveCountMax=str(_ALIVE_COUNT),
            ClearAllForwardings="yes",
            ForwardAgent="no",
        ),
        *(() if host.user is None else ("-l", host.user)),
        *(() if host.port is None else ("-p", str(host.port))),
        "--",
        host.name,
        remote,
    ]


def start(host: Host, ssh_config: str | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command_for(host, ssh_config),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C at the terminal comes to the launcher alone, which decides what to do.
        start_new_session=True,
    )


def python_of(host: Host) -> str:
    return host.python or sys.executable


def explain(host: Host, exit_code: int | None, said: str) -> str:
    """Why the host process did not start: one paragraph with what to do."""
    said = said.strip()
    lower = said.lower()
    name = f"{host.user}@{host.name}" if host.user else host.name
    if exit_code in (None, _SSH_FAILED):
        for symptom, remedy in _REMEDIES:
            if symptom in lower:
                return f"{_last_line(said)}; {remedy.format(name=name)}"
    if exit_code in _NO_COMMAND:
        return (
            f"there is no python at {python_of(host)}, or none that may be run: name the right one "
            "with `python` in a TOML hosts file"
        )
    if "no module named 'parallax" in lower:
        return (
            f"its python ({python_of(host)}) has no Parallax, or an old one: install "
            "parallax-torch there as it is here, or name another with `python` in a TOML hosts file"
        )
    if exit_code is None:
        return "no answer came: does its shell wait for something when it starts?"
    what = f"the connection ended with exit code {exit_code}"
    return f"{what}: {' '.join(said.split())[-_SHOWN_CHARACTERS:]}" if said else what


def _options(**options: str) -> list[str]:
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _last_line(said: str) -> str:
    return said.splitlines()[-1].strip().rstrip(".")[:_SHOWN_CHARACTERS]
