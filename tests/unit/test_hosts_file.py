"""The hosts file: what it may say, and what is refused and how."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from parallax.errors import ConfigError, HostsFileError
from parallax.launch.hosts import Host, is_local, read_hosts, workers_of

UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"


def read(tmp_path: Path, text: str | bytes, name: str = "hosts") -> tuple[Host, ...]:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_hosts(path)


def refused(tmp_path: Path, text: str | bytes, name: str = "hosts") -> str:
    """What the error says after the path of the file."""
    with pytest.raises(HostsFileError) as caught:
        read(tmp_path, text, name)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / name))
    assert "\n" not in message
    assert len(message) < 600
    return message.removeprefix(str(tmp_path / name)).lstrip(", ")


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1", Host(name="node1")),
        ("node1:", Host(name="node1")),
        ("  node1\t: \t", Host(name="node1")),
        ("node1: 0", Host(name="node1", devices=("0",))),
        ("node1:0,1,2", Host(name="node1", devices=("0", "1", "2"))),
        ("node1 : 3 , 1,\t10 # the rest is broken", Host(name="node1", devices=("3", "1", "10"))),
        ("Node-1_b.example.com#x", Host(name="Node-1_b.example.com")),
        ("10.0.0.1: 0", Host(name="10.0.0.1", devices=("0",))),
        ("[fd00::7]", Host(name="fd00::7")),
        ("[fd00::7]: 0,1", Host(name="fd00::7", devices=("0", "1"))),
        ("[fd00::7] :0", Host(name="fd00::7", devices=("0",))),
        ("[fe80::1%eth0]:", Host(name="fe80::1%eth0")),
        ("ubuntu@node1: 0", Host(name="node1", user="ubuntu", devices=("0",))),
        ("a.b-c_1@[::1]", Host(name="::1", user="a.b-c_1")),
        (f"node1: GPU-{UUID}", Host(name="node1", devices=(f"GPU-{UUID}",))),
        (f"node1: MIG-{UUID}", Host(name="node1", devices=(f"MIG-{UUID}",))),
        (f"node1: MIG-GPU-{UUID}/3/0", Host(name="node1", devices=(f"MIG-GPU-{UUID}/3/0",))),
        ("1x", Host(name="1x")),
    ],
)
def test_a_line(tmp_path: Path, line: str, host: Host) -> None:
    assert read(tmp_path, line) == (host,)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_lines_keep_their_order_and_comments_count_for_nothing(
    tmp_path: Path, newline: str, start: str
) -> None:
    text = f"{start}# all of them\n\nnode2: 1\n   \n\t# node3\nnode1:0 # first\n"
    hosts = read(tmp_path, text.replace("\n", newline))
    assert [(host.name, host.devices) for host in hosts] == [("node2", ("1",)), ("node1", ("0",))]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("node 1", "'node 1' is not understood: a line is `HOST` or `HOST: 0,1`"),
        ("node1 0,1", "is not understood"),
        ("node1 slots=4", "is not understood"),
        ("-oProxyCommand=id", "host is '-oProxyCommand=id'; allowed are names of ASCII letters"),
        ("-node", "do not begin with '-'"),
        ("x@-node", "do not begin with '-'"),
        (".node", "do not begin with '-' or '.'"),
        ("node.", "host is 'node.'"),
        ("a..b", "host is 'a..b'"),
        ("node;id", "host is 'node;id'"),
        ("$(id)", "host is '$(id)'"),
        ("`id`", "host is '`id`'"),
        ("a|b", "host is"),
        ("a&b", "host is"),
        ("a>b", "host is"),
        ("a'b", "host is"),
        ('a"b', "host is"),
        ("a\\b", "host is"),
        ("a/b", "host is"),
        ("a*", "host is"),
        ("nöde", "host is 'nöde'"),
        ("node\u2028x", "is not understood"),
        ("node\x1b[31m", r"host is 'node\x1b[31m'"),
        ("a\x07b", "host is"),
        ("x" * 254, "host is 'xxx"),
        ("10.0.0", "host is '10.0.0'"),
        ("10.0.0.256", "host is"),
        ("7", "host is '7'"),
        ("0.0.0.0", "which is not the address of one host"),
        ("224.0.0.1", "which is not the address of one host"),
        ("[::]", "which is not the address of one host"),
        ("fd00::7", "'fd00::7' has more than one ':'; put an IPv6 address into brackets"),
        ("fd00::7: 0,1", "has more than one ':'"),
        ("[fd00::7", "is not `[fd00::7]`"),
        ("[fd00::7] 0", "is not `[fd00::7]`"),
        ("[node1]: 0", "is not `[fd00::7]`"),
        ("[fd00::zz]", "host is 'fd00::zz'"),
        ("[fe80::1%a;b]", "host is 'fe80::1%a;b'"),
        (":", "host is ''; allowed is a string that is not empty"),
        (": 0", "host is ''"),
        ("@node1", "user is ''"),
        ("-l@node1", "user is '-l'"),
        ("a b@node1", "user is 'a b'; allowed is a name"),
        ("a@b@node1", "user is 'a@b'"),
        ("user@", "host is ''"),
        ("node1: 0,", "the device '' is not understood; allowed are the numbers of GPUs"),
        ("node1: 0,,1", "the device '' is not understood"),
        ("node1: 0 1", "the device '0 1' is not understood"),
        ("node1: 0;1", "the device '0;1'"),
        ("node1: -1", "the device '-1'"),
        ("node1: 01", "the device '01'"),
        ("node1:2222", "the device '2222'"),
        ("node1: all", "the device 'all'"),
        ("node1: GPU-", "the device 'GPU-'"),
        ("node1: GPU-xyz", "the device 'GPU-xyz'"),
        ("node1: ٣", "the device '٣'"),
        ("node1: 0,1,0", "the device 0 is there twice"),
        ("node1: GPU-ab,GPU-AB", "the device GPU-AB is there twice"),
        ("node1: 0,GPU-ab", "all by number or all by UUID"),
        ("node1: " + "0" * 9999, "the device '000"),
    ],
)
def test_a_line_that_is_refused(tmp_path: Path, line: str, says: str) -> None:
    message = refused(tmp_path, f"# hosts\nfirst\n{line}\nlast\n")
    assert message.startswith("line 3: ")
    assert says in message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("node1", "node1"),
        ("node1", "NODE1: 0"),
        ("node1", "ubuntu@node1"),
        ("[fd00::7]", "[FD00:0::0007]"),
    ],
)
def test_a_repeated_host_is_refused(tmp_path: Path, first: str, second: str) -> None:
    message = refused(tmp_path, f"{first}\nother\n{second}\n")
    assert message.startswith("line 3: the host ")
    assert "is there already (line 1)" in message


@pytest.mark.parametrize("text", ["", "\n\n", "# node1\n", "\ufeff"])
def test_a_file_without_hosts_is_refused(tmp_path: Path, text: str) -> None:
    assert "names no host: a line is `HOST`" in refused(tmp_path, text)


@pytest.mark.parametrize("text", ["", "[defaults]\n", "hosts = []\n"])
def test_a_toml_file_without_hosts_is_refused(tmp_path: Path, text: str) -> None:
    assert 'names no host: a host is `[[hosts]]` and `host = "node1"`' in refused(
        tmp_path, text, "hosts.toml"
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"node1\nn\xf6de\n", "line 2: the byte 0xf6 is no text in UTF-8"),
        (b"node1\n\n# \x00\n", "line 3: the byte 0x00 is no text in UTF-8"),
        ("node1\n".encode("utf-16"), "line 1: the byte 0xff is no text in UTF-8"),
        (b"#" * (1 << 20) + b"\n", "has more than 1048576 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["hosts", "hosts.toml"])
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes, says: str, name: str) -> None:
    assert says in refused(tmp_path, data, name)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostsFileError, match="is a directory; give a hosts file"):
        read_hosts(tmp_path)
    with pytest.raises(HostsFileError, match="cannot read the hosts file .*: No such file"):
        read_hosts(tmp_path / "nothing")
    with pytest.raises(HostsFileError, match="cannot read the hosts file .*: embedded null"):
        read_hosts("a\0b")
    with pytest.raises(HostsFileError, match="more than 1048576 bytes"):
        read_hosts("/dev/zero")


FULL = """
[defaults]
user = "trainer"
port = 2222
workers = 2
python = "/opt/my env/bin/python"
directory = "/srv/jobs"
interface = "eth0"
environment = { A = "default", B = "b\\n=$HOME" }

[[hosts]]
host = "node1"
address = "10.0.0.1"
user = "root"
port = 22
devices = [1, 0]
python = "python3.12"
directory = "/"
interface = "ib0"
[hosts.environment]
A = "own"

[[hosts]]
host = "fd00::7"
address = "node2.internal"
"""


@pytest.mark.parametrize("name", ["hosts.toml", "HOSTS.TOML", "hosts"])
def test_toml(tmp_path: Path, name: str) -> None:
    own, by_default = read(tmp_path, FULL, name)
    assert own == Host(
        name="node1",
        address="10.0.0.1",
        user="root",
        port=22,
        devices=("1", "0"),
        python="python3.12",
        directory="/",
        environment={"A": "own", "B": "b\n=$HOME"},
        interface="ib0",
    )
    assert by_default == Host(
        name="fd00::7",
        address="node2.internal",
        user="trainer",
        port=2222,
        num_workers=2,
        python="/opt/my env/bin/python",
        directory="/srv/jobs",
        environment={"A": "default", "B": "b\n=$HOME"},
        interface="eth0",
    )
    assert len({own, by_default}) == 2  # can be put into a set


@pytest.mark.parametrize(
    "text",
    [
        '# comment\n[[hosts]] # first\nhost = "node1"',
        'hosts = [{ host = "node1" }]',
        '[ defaults ]\n[[hosts]]\nhost = "node1"',
        'defaults = {}\n[[hosts]]\nhost = "node1"',
    ],
)
def test_toml_is_known_by_its_first_line(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == (Host(name="node1"),)


def test_own_workers_replace_devices_of_the_defaults(tmp_path: Path) -> None:
    hosts = '[[hosts]]\nhost = "a"\nworkers = 3\n[[hosts]]\nhost = "b"\n'
    own, by_default = read(tmp_path, f'[defaults]\ndevices = [0, "1"]\n{hosts}')
    assert (own.num_workers, own.devices) == (3, ())
    assert (by_default.num_workers, by_default.devices) == (None, ("0", "1"))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("gpus = [0]", "unknown key 'gpus'; the keys are host, address, user, port, workers,"),
        ('host = "node9"', "Cannot overwrite"),
        ("address = 5", "address is 5; allowed is a string that is not empty"),
        ('address = ""', "address is ''"),
        ('address = "a b"', "address is 'a b'; allowed are names of ASCII letters"),
        ('address = "root@10.0.0.1"', "(the user is a key of its own, user)"),
        ('address = "[fd00::7]"', "address is '[fd00::7]'"),
        ('address = "-x"', "address is '-x'"),
        ('address = "10.0.0.1:22"', "address is '10.0.0.1:22'"),
        ("user = true", "user is True"),
        ('user = "a;b"', "user is 'a;b'"),
        ('user = "-l"', "user is '-l'"),
        ('user = "a\\u0000"', r"user is 'a\x00'"),
        ("port = 0", "port is 0; allowed is a number from 1 to 65535"),
        ("port = 65536", "port is 65536"),
        ("port = -1", "port is -1"),
        ("port = true", "port is True"),
        ("port = 22.0", "port is 22.0"),
        ('port = "22"', "port is '22'"),
        ("workers = 0", "workers is 0; allowed is a number from 1 up"),
        ("workers = -1", "workers is -1"),
        ("workers = true", "workers is True"),
        ("workers = 1.5", "workers is 1.5"),
        ('workers = "2"', "workers is '2'"),
        ("workers = 1\ndevices = [0]", "both workers and devices"),
        ("devices = []", "devices is []; allowed is a list such as [0, 1]"),
        ('devices = "0,1"', "devices is '0,1'"),
        ("devices = 2", "devices is 2"),
        ("devices = [true]", "the device True"),
        ("devices = [0.0]", "the device 0.0"),
        ("devices = [-1]", "the device -1"),
        ("devices = [[0]]", "the device [0]"),
        ('devices = [1, "1"]', "the device 1 is there twice"),
        ('python = "~/venv/bin/python"', "nothing is expanded in a hosts file"),
        ('python = "$HOME/bin/python"', "nothing is expanded in a hosts file"),
        ('python = "venv/bin/python"', "allowed are an absolute path and the name of a command"),
        ('python = "-c"', "does not begin with '-'"),
        ('python = ""', "python is ''"),
        ('python = "/a\\nb"', "python is '/a\\nb'"),
        ('python = "/a\\u0000b"', r"python is '/a\x00b'"),
        ("python = 3.11", "python is 3.11"),
        ('directory = "jobs"', "directory is 'jobs'; allowed is an absolute path"),
        ('directory = "~"', "nothing is expanded"),
        ('directory = "/a\\u0000b"', "directory is"),
        ("environment = []", "environment is a list; allowed is a table"),
        ('environment = { "A=B" = "1" }', "environment has the variable 'A=B'"),
        ('environment = { "" = "1" }', "environment has the variable ''"),
        ('environment = { "1A" = "1" }', "environment has the variable '1A'"),
        ('environment = { "A\\n" = "1" }', r"environment has the variable 'A\n'"),
        ('environment = { "A-B" = "1" }', "environment has the variable 'A-B'"),
        ('environment = { "Ä" = "1" }', "environment has the variable 'Ä'"),
        ('environment = { "A\\u0000" = "1" }', "environment has the variable"),
        ("environment = { A = 1 }", "environment has something else for A than a string"),
        ('environment = { A = "x\\u0000" }', "environment has something else for A than a string"),
        ('environment = { RANK = "0" }', "environment has RANK, which the launcher sets itself"),
        (
            'devices = [0]\nenvironment = { CUDA_VISIBLE_DEVICES = "1" }',
            "both devices and CUDA_VISIBLE_DEVICES",
        ),
        ('interface = "eth0,eth1"', "interface is 'eth0,eth1'; allowed is one name"),
        ('interface = "-eth0"', "interface is '-eth0'"),
        ('interface = "a23456789012345x"', "of at most 15 characters"),
        ("interface = 0", "interface is 0"),
    ],
)
def test_a_table_that_is_refused(tmp_path: Path, entry: str, says: str) -> None:
    first = '[[hosts]]\nhost = "node1"\n'
    message = refused(tmp_path, f'{first}[[hosts]]\nhost = "node2"\n{entry}\n', "hosts.toml")
    assert says in message
    assert message.startswith("[[hosts]] 2 ('node2'): ") or "Cannot overwrite" in message
    if "host =" not in entry and not entry.startswith("address"):
        message = refused(tmp_path, f"[defaults]\n{entry}\n{first}", "hosts.toml")
        assert says in message
        assert message.startswith(("[defaults]: ", "[[hosts]] 1 "))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts = 5", "top level: hosts is 5; write a table [[hosts]] for each host"),
        ('hosts = ["node1"]', "top level: hosts is ['node1']; write a table [[hosts]]"),
        ('[hosts]\nhost = "a"', "top level: hosts is {'host': 'a'}; write a table [[hosts]]"),
        ('[[host]]\nhost = "a"', "top level: unknown key 'host'; the keys are hosts, defaults"),
        ("defaults = 1", "[defaults]: defaults is 1; write a table [defaults]"),
        ('[defaults]\nhost = "a"', "[defaults]: host belongs to one host"),
        ('[defaults]\naddress = "a"', "[defaults]: address belongs to one host"),
        ("[[hosts]]\nport = 1", '[[hosts]] 1: the key host is missing; write host = "node1"'),
        ("[[hosts]]\nhost = 1", "[[hosts]] 1: host is 1"),
        ('[[hosts]]\nhost = "a@b"', "[[hosts]] 1 ('a@b'): host is 'a@b' (the user is a key"),
        (
            '[[hosts]]\nhost = "a"\n[[hosts]]\nhost = "A"',
            "[[hosts]] 2 ('A'): the host 'A' is there already ([[hosts]] 1 ('a'))",
        ),
        ("node1: 0,1", "is not valid TOML"),
        ("[[hosts]\n", "is not valid TOML"),
        ("a = " + "[" * 5000, "is not valid TOML"),
    ],
)
def test_toml_that_is_refused(tmp_path: Path, text: str, says: str) -> None:
    assert refused(tmp_path, text, "hosts.toml").startswith(says)


def test_an_error_of_toml_names_the_line(tmp_path: Path) -> None:
    assert "(at line 2, column" in refused(tmp_path, '[[hosts]]\nhost = "a\n', "hosts.toml")


def test_the_workers_of_each_host() -> None:
    plain, two = Host(name="a"), Host(name="b", num_workers=2)
    gpus = Host(name="c", devices=("0", "1", "2"))
    assert workers_of([plain, two, gpus]) == (1, 2, 3)
    assert workers_of([plain, two, gpus], 4) == (4, 2, 3)
    with pytest.raises(ConfigError, match="-n is 0, but a host needs at least 1 worker"):
        workers_of([plain], 0)
    with pytest.raises(ConfigError, match=re.escape("-n 3 would change nothing")):
        workers_of([gpus, two], 3)


@pytest.mark.parametrize("hostname", ["node1", "node1.example.com", "NODE1.Example.com"])
def test_this_machine_is_known_by_its_names(monkeypatch: pytest.MonkeyPatch, hostname: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    for name in ("localhost", "LOCALHOST", "127.0.0.1", "::1", "0:0::1", "node1", hostname):
        assert is_local(Host(name=name)), name
        assert not is_local(Host(name=name, user="root"))
        assert not is_local(Host(name=name, port=22))
    for name in ("node2", "node1.other.com", "127.0.0.2", "10.0.0.1", "node"):
        assert not is_local(Host(name=name)), name
