"""Bring up hosts on this machine, run a command on the control host, and take all down again."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from benchmarks.testbed import quota
from benchmarks.testbed.bed import Testbed, host_names
from benchmarks.testbed.namespace import FILES, TestbedError
from benchmarks.testbed.transfer import transfer

EXAMPLES = """\
examples:
  python -m benchmarks.testbed --hosts 4 --rate 200mbit -- ssh a hostname
  python -m benchmarks.testbed --hosts 2 --cpus 1 --cpus b=0.5      # a shell on control
  python -m benchmarks.testbed --hosts 2 --rate 200mbit --measure   # the rates reached

In the command `ssh HOST` works as it is. Its environment has PARALLAX_TESTBED_SSH_CONFIG, for
programs that want a configuration file, and PARALLAX_TESTBED_HOSTS, a hosts file for
`parallax run --hosts`. Ctrl-C is for the command; when it ends everything else does.
"""

T = TypeVar("T")


def main() -> int:
    options = _parser().parse_args()
    try:
        if options.sweep:
            print(f"removed {len(quota.sweep())} groups of test beds that had crashed")
            return 0
        bed = _bed(options)
    except (ValueError, TestbedError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 2
    return _run(bed, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=int, metavar="N", help="how many (2, or as many as --names)")
    add("--names", metavar="A,B", help="their names (a,b,c,…)")
    rate_help = "rate of a link in each direction, as tc writes it; again for other hosts"
    add("--rate", action="append", default=[], metavar="[HOST=]RATE", help=rate_help)
    cpus_help = "processors that a host may use; again for other hosts"
    add("--cpus", action="append", default=[], metavar="[HOST=]CPUS", help=cpus_help)
    workers_help = "workers of a host in the hosts file (1)"
    add("--workers", type=int, default=1, metavar="N", help=workers_help)
    measure_help = "send MB (50) to and from each host, and show the rates, instead of a command"
    add("--measure", type=int, nargs="?", const=50, metavar="MB", help=measure_help)
    sweep_help = "only remove the CPU groups that a crash left, as every start does"
    add("--sweep", action="store_true", help=sweep_help)
    add("command", nargs="*", metavar="COMMAND", help="what to run (a shell)")
    return parser


def _bed(options: argparse.Namespace) -> Testbed:
    given = options.names.split(",") if options.names else None
    names = host_names(options.hosts or len(given or "ab"), given)
    return Testbed(
        len(names),
        names=names,
        rate=_per_host("--rate", options.rate, names, str),
        cpus=_per_host("--cpus", options.cpus, names, float),
    )


def _per_host(
    option: str, given: list[str], names: list[str], kind: Callable[[str], T]
) -> dict[str, T]:
    """`V` is for all hosts, `HOST=V` for one; the later wins."""
    values: dict[str, T] = {}
    for item in given:
        host, _, value = item.rpartition("=")
        try:
            values.update(dict.fromkeys([host] if host else names, kind(value)))
        except ValueError:
            raise ValueError(f"{option} {item}: {value!r} is no number") from None
    return values


def _run(bed: Testbed, options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, _leave)
    try:
        with bed:
            _print_hosts(bed)
            if options.measure is not None:
                _measure(bed, options.measure)
                return 0
            code = _run_command(bed, options)
            _print_counters(bed)
            return code
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _leave(number: int, frame: FrameType | None) -> Any:
    sys.exit(128 + number)


def _run_command(bed: Testbed, options: argparse.Namespace) -> int:
    bed.write_hosts_file(bed.control.namespace.path(f"{FILES}/hosts.toml"), workers=options.workers)
    environment = {
        **os.environ,
        "PARALLAX_TESTBED_SSH_CONFIG": bed.ssh_config,
        "PARALLAX_TESTBED_HOSTS": f"{FILES}/hosts.toml",
    }
    command = options.command or [os.environ.get("SHELL", "/bin/sh")]
    try:
        process = bed.popen(command, env=environment)
    except OSError as error:
        print(f"testbed: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command got it too, and decides
    code = process.wait()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return code if code >= 0 else 128 - code


def _print_hosts(bed: Testbed) -> None:
    print(f"{'host':12} {'address':14} {'rate':10} cpus")
    for host in [*bed.hosts, bed.control]:
        rate, cpus = bed.rate(host) or "-", bed.cpus(host) or "-"
        print(f"{host.name:12} {host.address:14} {rate:10} {cpus}")
    print(flush=True)


def _print_counters(bed: Testbed) -> None:
    print(f"\n{'host':12} {'sent bytes':>16} {'received bytes':>16}")
    for host in [*bed.hosts, bed.control]:
        sent, received = bed.counters(host)
        print(f"{host.name:12} {sent:16,} {received:16,}")


def _measure(bed: Testbed, megabytes: int) -> None:
    """Control has no shaped link, so each transfer meets only the host's own."""
    print(f"{'host':12} {'sends':>14} {'receives':>14}")
    for host in bed.hosts:
        ways = [(host, bed.control), (bed.control, host)]
        rates = [megabytes * 8 / transfer(bed, *way, megabytes * 1_000_000) for way in ways]
        print(f"{host.name:12} {rates[0]:9.1f} mbit {rates[1]:9.1f} mbit", flush=True)


if __name__ == "__main__":
    sys.exit(main())
