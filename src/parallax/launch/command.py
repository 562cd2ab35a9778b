"""The `parallax` command: reads its arguments and calls what does the work."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from parallax.errors import ParallaxError
from parallax.launch import local
from parallax.launch.job import Job, Kind

_USAGE_ERROR = 2
_INTERRUPTED = 130
_EXPORT_SUFFIXES = (".pt", ".pth", ".safetensors")

_RUN_DESCRIPTION = """\
Start N workers on this machine, each running the same script, and watch over them.

Everything after the script's name belongs to the script. Every line that a worker
prints is shown with its name, `[worker 2] …`. When one worker fails, the others are
ended, its traceback is shown last, and its exit code is returned. Ctrl-C ends them all.
"""

_RUN_EXAMPLES = """\
examples:
  parallax run -n 4 train.py --epochs 10
  parallax run -n 4 -m package.train --epochs 10
  parallax run -n 4 --log-dir logs train.py

The workers find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their
environment, as under torchrun. OMP_NUM_THREADS is set to each worker's share of the
cores unless it is set already. Standard input is empty.
"""


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
    _add_export(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    run = commands.add_parser(
        "run",
        help="train on several workers of this machine",
        usage="parallax run -n N [--log-dir DIR] (-m MODULE | [--] SCRIPT) [ARGUMENT ...]",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument(
        "-n", "--workers", type=_positive, required=True, metavar="N", help="how many workers"
    )
    run.add_argument(
        "--log-dir",
        metavar="DIR",
        help="also keep the output of worker I in DIR/worker-I.log, replacing an earlier one",
    )
    # `_split` takes it away with all that follows; it stands here for the help.
    run.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as `python -m`")


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
        position += 2 if word in ("-n", "--workers", "--log-dir") else 1
    return argv, None


def _script(kind: Kind, words: list[str]) -> _Script | None:
    return (kind, words[0], words[1:]) if words else None


def _run(options: argparse.Namespace, script: _Script | None) -> int:
    if script is None:
        return _refuse("no script was given: parallax run -n 4 train.py")
    kind, program, arguments = script
    if kind == "script" and not os.path.exists(program):
        return _refuse(f"there is no script {program!r} (the directory is {os.getcwd()})")
    if importlib.util.find_spec("torch") is None:
        return _refuse(f"{sys.executable} has no PyTorch: install torch, or use another python")
    job = Job(
        num_workers=options.workers,
        kind=kind,
        program=program,
        arguments=tuple(arguments),
        log_dir=options.log_dir,
    )
    try:
        return local.run(job)
    except OSError as error:
        return _refuse(str(error), code=1)


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
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers, 1 or more")
    return number


def _version() -> str:
    try:
        return importlib.metadata.version("parallax-torch")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
