"""The `parallax` command: reads its arguments and calls what does the work."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import math
import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from parallax.errors import ConfigError, ParallaxError
from parallax.launch import launcher, outlook
from parallax.launch.check import measured
from parallax.launch.check.survey import Way, check
from parallax.launch.hosts import Host, read_hosts, workers_of
from parallax.launch.job import Job, Kind, Program

_USAGE_ERROR = 2
_INTERRUPTED = 130
_EXPORT_SUFFIXES = (".pt", ".pth", ".safetensors")

_RUN_DESCRIPTION = """\
Start workers on this machine (-n) or on several (--hosts), each running the same script,
and watch over them.

Everything after the script's name belongs to the script. Every line that a worker
prints is shown with its name, `[worker 2] …` or `[node1 worker 2] …`. When one worker
fails, the others are ended, its traceback is shown last, and its exit code is returned.
Ctrl-C ends them all. (With --hosts Ctrl-Z is ignored: hosts could not tell it from death.)
"""

_RUN_EXAMPLES = """\
examples:
  parallax run -n 4 train.py --epochs 10
  parallax run -n 4 -m package.train --epochs 10
  parallax run --hosts hosts.txt --log-dir logs train.py
  parallax run --hosts hosts.toml --max-restarts 3 --resume /shared/checkpoints train.py

A hosts file has a line for each host, `node1` or `node1: 0,1,2,3` with the GPUs to use,
or is TOML with [[hosts]] tables (host, address, user, port, workers or devices, python,
directory, environment, interface). Hosts are reached with `ssh`, which must not ask for
anything; python, directory and script are the same as here unless the file says else.
`parallax check --hosts FILE` tells whether all is ready.

The workers find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their
environment, as under torchrun. OMP_NUM_THREADS is set to each worker's share of its
host's cores unless it is set already. Standard input is empty.
"""

_CHECK_DESCRIPTION = """\
Reach every host, compare the versions of python, torch and parallax, the clocks and free
ports, and measure latency and bandwidth between each pair: about 2 s and at most 140 MB
a pair, several pairs at a time. Ends with what is wrong and what to do, and with exit code
0 if a job can start. The rates are kept for the planner.
"""

_PLAN_DESCRIPTION = """\
Show what a run planned, why, and what its steps took beside what was predicted. With
--hosts, --workers-per-host, --rate or --local-rate also what a cluster that is not there
would make of it: samples a second if all parameters were all-reduced (rows gathered), if
all were sharded, and with each the way that moves the fewest bytes. RUN is the folder
that the script gave as Config.run_dir.
"""

_PLAN_EXAMPLES = """\
examples:
  parallax plan runs/today
  parallax plan runs/today --hosts 16 --workers-per-host 8 --rate 100gbit --plot scaling.png
"""

_OPTIONS_WITH_VALUE = (
    "-n", "--workers", "--hosts", "--log-dir", "--max-restarts", "--resume", "--interface",
    "--port", "--ssh-config", "--start-timeout",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Answers a mistake with one sentence and the way to the help."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE_ERROR, f"parallax: {message}. See `{self.prog} --help`.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    arguments, script = _split(list(sys.argv[1:] if argv is None else argv))
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A worker may print what this terminal cannot show.
        sys.stdout.reconfigure(errors="replace")
    try:
        if options.command == "export":
            return _export(options.checkpoint_dir, options.out)
        if options.command == "check":
            return _check(options)
        if options.command == "plan":
            return _plan(options)
        return _run(options, script)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="parallax",
        description="Data-parallel training for PyTorch that knows what is sparse.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"parallax {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_check(commands)
    _add_plan(commands)
    _add_export(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    run = commands.add_parser(
        "run",
        help="train on several workers, of this machine or of many",
        usage="parallax run (-n N | --hosts FILE) [OPTION ...] (-m MODULE | [--] SCRIPT) "
        "[ARGUMENT ...]",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument(
        "-n",
        "--workers",
        type=_positive,
        metavar="N",
        help="how many workers; with --hosts, on each host that does not say itself (default 1)",
    )
    run.add_argument("--hosts", metavar="FILE", help="start on the hosts that FILE names")
    run.add_argument(
        "--log-dir",
        metavar="DIR",
        help="also keep the output of worker I in DIR/worker-I.log, replacing an earlier one",
    )
    run.add_argument(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="R",
        help="after a failure, start again up to R times on the hosts that are left or have come "
        "back; needs --resume",
    )
    run.add_argument(
        "--resume",
        metavar="DIR",
        help="begin from the newest complete checkpoint in DIR if there is one, and keep "
        "checkpoints there (Config.checkpoint_steps, checkpoint_seconds, checkpoint_keep); with "
        "--hosts, all must share it",
    )
    _add_port(run)
    _add_ways(run)
    # `_split` takes it away with all that follows; it stands here for the help.
    run.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as `python -m`")


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    check = commands.add_parser(
        "check",
        help="see whether hosts are ready to train together, and how fast their links are",
        description=_CHECK_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    check.add_argument("--hosts", metavar="FILE", required=True, help="the hosts to look at")
    _add_port(check)
    _add_ways(check)


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=_port,
        default=0,
        metavar="P",
        help="the port of the first host where the others meet it (default: any that is free)",
    )


def _add_ways(parser: argparse.ArgumentParser) -> None:
    """How hosts are reached, and how they reach each other."""
    parser.add_argument(
        "--interface",
        metavar="NAME",
        help="the network interface that the hosts talk over (default: where ssh comes in)",
    )
    parser.add_argument("--ssh-config", metavar="FILE", help="a configuration file for ssh")
    parser.add_argument(
        "--start-timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds in which every host must answer, and then all must meet (default 60)",
    )


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="show a run's plan beside what it took, and what another cluster would make of it",
        description=_PLAN_DESCRIPTION,
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    plan.add_argument("run", metavar="RUN", help="the run's folder")
    plan.add_argument("--hosts", type=_positive, metavar="H", help="what if there were H hosts")
    plan.add_argument(
        "--workers-per-host", type=_positive, metavar="K", help="… with K workers each"
    )
    plan.add_argument("--rate", metavar="R", help="… and links of this rate, say 100gbit")
    plan.add_argument(
        "--local-rate", metavar="R", help="… and within a host (default: as measured)"
    )
    plan.add_argument("--plot", metavar="PNG", help="also draw it (needs matplotlib)")


def _add_export(commands: argparse._SubParsersAction[_Parser]) -> None:
    export = commands.add_parser(
        "export",
        help="turn a checkpoint into one file that plain PyTorch reads",
        description="Join the parts of a checkpoint into one file that plain PyTorch reads.",
        allow_abbrev=False,
    )
    export.add_argument("checkpoint_dir", metavar="CHECKPOINT_DIR", help="a saved checkpoint")
    export.add_argument(
        "out", metavar="OUT", help=f"the file to write: {', '.join(_EXPORT_SUFFIXES)}"
    )


_Script = tuple[Kind, str, list[str]]


def _split(argv: list[str]) -> tuple[list[str], _Script | None]:
    """Part the options of `run` from the script and the arguments that belong to it.

    argparse is not asked to: it would take the script's `-n` and `--` for its own.
    """
    if argv[:1] != ["run"]:
        return argv, None
    position = 1
    while position < len(argv):
        word = argv[position]
        options, rest = argv[:position], argv[position + 1 :]
        if word == "--":
            return options, _script("script", rest)
        if word.startswith("-m"):
            return options, _script("module", [word[2:], *rest] if word[2:] else rest)
        if not word.startswith("-"):
            return options, _script("script", [word, *rest])
        position += 2 if word in _OPTIONS_WITH_VALUE else 1
    return argv, None


def _script(kind: Kind, words: list[str]) -> _Script | None:
    return (kind, words[0], words[1:]) if words else None


def _run(options: argparse.Namespace, script: _Script | None) -> int:
    if script is None:
        return _refuse("no script was given: parallax run -n 4 train.py")
    if options.workers is None and options.hosts is None:
        return _refuse("how many workers? Give -n/--workers N, or --hosts FILE")
    if options.max_restarts and options.resume is None:
        return _refuse("--max-restarts needs --resume DIR, where the checkpoints are")
    if options.log_dir is not None and (problem := _log_problem(options.log_dir)) is not None:
        return _refuse(problem)
    try:
        return launcher.run(_job(options, script))
    except ConfigError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(str(error), code=1)


def _log_problem(log_dir: str) -> str | None:
    try:
        os.makedirs(log_dir, exist_ok=True)
    except OSError as error:
        return f"--log-dir {log_dir!r} cannot be made: {error.strerror}; name another directory"
    if not os.access(log_dir, os.W_OK):
        return f"--log-dir {log_dir!r} cannot be written to; name another directory"
    return None


def _job(options: argparse.Namespace, script: _Script) -> Job:
    kind, program, arguments = script
    is_local = options.hosts is None
    if is_local and kind == "script" and not os.path.exists(program):
        raise ConfigError(f"there is no script {program!r} (the directory is {os.getcwd()})")
    hosts = (Host(name="localhost"),) if is_local else read_hosts(options.hosts)
    return Job(
        program=Program(kind=kind, name=program, arguments=tuple(arguments)),
        hosts=hosts,
        num_workers=workers_of(hosts, options.workers),
        log_dir=options.log_dir,
        max_restarts=options.max_restarts,
        resume=options.resume,
        start_seconds=options.start_timeout,
        interface=options.interface,
        port=options.port,
        ssh_config=options.ssh_config,
        link_rate=None if is_local else measured.slowest(hosts, os.environ),
        columns=_columns("" if is_local else max((h.name for h in hosts), key=len)),
        is_local=is_local,
    )


def _columns(host: str) -> int | None:
    """What a progress bar has beside the worker's name; None where there is no terminal."""
    if not sys.stderr.isatty():
        return None
    return max(20, shutil.get_terminal_size().columns - len(f"[{host} worker 00] "))


def _check(options: argparse.Namespace) -> int:
    try:
        way = Way(
            interface=options.interface,
            port=options.port,
            ssh_config=options.ssh_config,
            start_seconds=options.start_timeout,
        )
        return check(read_hosts(options.hosts), way)
    except ConfigError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(str(error), code=1)


def _plan(options: argparse.Namespace) -> int:
    wanted = options.hosts, options.workers_per_host, options.rate, options.local_rate
    try:
        run = outlook.Run.of(options.run)
        lines = outlook.described(run)
        if any(wanted) or options.plot is not None:
            cluster = outlook.cluster_of(run, *wanted)
            lines += ["", *outlook.what_if(run, cluster)]
            if options.plot is not None:
                outlook.draw(run, cluster, options.plot)
    except (ConfigError, OSError) as error:
        return _refuse(str(error))
    print("\n".join(lines))
    return 0


def _export(checkpoint_dir: str, out: str) -> int:
    if not out.endswith(_EXPORT_SUFFIXES):
        return _refuse(f"OUT is {out!r} and must end with {', '.join(_EXPORT_SUFFIXES)}")
    # Imports torch: only now.
    from parallax.checkpoint import export

    try:
        written = export(checkpoint_dir, out)
    except (ParallaxError, OSError) as error:
        return _refuse(str(error), code=1)
    print(f"{out}: {written.num_tensors} tensors, {written.size_bytes} bytes")
    return 0


def _refuse(message: str, code: int = _USAGE_ERROR) -> int:
    print(f"parallax: {message}", file=sys.stderr)
    return code


def _positive(text: str) -> int:
    return _number(text, 1, None, "a number of workers, 1 or more")


def _count(text: str) -> int:
    return _number(text, 0, None, "a number, 0 or more")


def _port(text: str) -> int:
    return _number(text, 1, 65535, "a port, 1 to 65535")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _number(text: str, smallest: int, largest: int | None, what: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = smallest - 1
    if number < smallest or (largest is not None and number > largest):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


def _version() -> str:
    try:
        return importlib.metadata.version("parallax-torch")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
