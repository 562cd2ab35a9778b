"""The command that reaches a host, and what is said when it does not."""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys

import pytest

from parallax.launch import ssh
from parallax.launch.hosts import Host


def test_nothing_is_asked_and_no_wait_is_endless() -> None:
    command = ssh.command_for(Host(name="node1", user="ann", port=2222), "my config")
    assert command[:3] == ["ssh", "-F", "my config"]
    options = {b for a, b in itertools.pairwise(command) if a == "-o"}
    assert {"BatchMode=yes", "ConnectTimeout=10", "ForwardAgent=no"} <= options
    assert command[command.index("-l") + 1] == "ann"
    assert command[command.index("-p") + 1] == "2222"
    assert command[-3:-1] == ["--", "node1"]


@pytest.mark.parametrize("python", ["/a b/python", "/x';touch y;'/python", "/$(ls)/`ls`/python"])
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_sees_one_command_and_three_words(python: str, shell: str) -> None:
    remote = ssh.command_for(Host(name="node1", python=python), None)[-1]
    assert shlex.split(remote)[:3] == ["exec", python, "-c"]
    assert len(shlex.split(remote)) == 4
    assert shlex.split(remote)[3].count("'") == 0
    # The shell itself must read it in the same way: it looks for that very file.
    done = subprocess.run([shell, "-c", remote], capture_output=True, text=True, timeout=10)
    assert done.returncode == 127
    assert python in done.stderr


def test_this_machine_needs_no_ssh() -> None:
    assert ssh.command_for(Host(name="localhost"), None)[:2] == [sys.executable, "-c"]
    assert ssh.command_for(Host(name="localhost", port=22), None)[0] == "ssh"


@pytest.mark.parametrize(
    ("code", "said", "remedy"),
    [
        (255, "ssh: Could not resolve hostname b: Name or service not known", "hosts file"),
        (255, "ssh: connect to host b port 22: Connection refused", "is sshd running"),
        (255, "ann@b: Permission denied (publickey,password).", "ssh-copy-id ann@b"),
        (255, "x\nHost key verification failed.", "run `ssh ann@b` once"),
        (255, "ssh: connect to host b port 22: Connection timed out", "firewall"),
        (1, "ModuleNotFoundError: No module named 'parallax'", "install parallax-torch"),
        (127, "bash: line 1: /opt/python: No such file or directory", "no python at /opt/python"),
        (None, "", "no answer came"),
        (3, "something else", "exit code 3: something else"),
    ],
)
def test_each_trouble_comes_with_what_to_do(code: int | None, said: str, remedy: str) -> None:
    text = ssh.explain(Host(name="b", user="ann", python="/opt/python"), code, said)
    assert remedy in text
    assert "\n" not in text
