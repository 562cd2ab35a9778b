"""What runs in a worker before and after the user's script."""

from __future__ import annotations

import builtins
import faulthandler
import io
import os
import pkgutil
import runpy
import sys
import time
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from parallax.cluster import variables
from parallax.launch import failure
from parallax.launch.host.lifeline import PARENT_PID, die_with_parent
from parallax.launch.host.rundir import RUN_DIRECTORY, STREAMS, RunDirectory, write_json

DEVICES = "PARALLAX_DEVICES"
"""The environment variable that tells a worker the GPUs of the host's workers."""

_INTERRUPTED = 130
_PEER_SECONDS = 2.0


def main() -> int:
    """Run the program of the command line as `python` would, and record how it fails."""
    die_with_parent(int(os.environ.pop(PARENT_PID)))
    directory = RunDirectory(os.environ.pop(RUN_DIRECTORY))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    _connect(directory, local_rank)
    _choose_device(local_rank)
    os.environ[variables.STEP_FILE] = directory.step(local_rank)
    kind, program, *arguments = sys.argv[1:]
    sys.argv[:] = [program, *arguments]
    try:
        _run_module(program) if kind == "module" else _run_script(program)
    except SystemExit as exit:
        code = _exit_code(exit)
        if code != 0:
            message = exit.code if isinstance(exit.code, str) else ""
            failure.write(directory, local_rank, failure.from_exit(rank, code, message))
        raise
    except KeyboardInterrupt:
        interrupted = failure.from_exit(rank, _INTERRUPTED, "KeyboardInterrupt")
        failure.write(directory, local_rank, interrupted)
        return _INTERRUPTED
    except BaseException as error:
        _record(directory, rank, local_rank, error)
        return 1
    return 0


def _connect(directory: RunDirectory, local_rank: int) -> None:
    """Send this process's output to the launcher."""
    write_json(directory.pid(local_rank), os.getpid())
    for target, stream in enumerate(STREAMS, start=1):
        fd = os.open(directory.fifo(local_rank, stream), os.O_WRONLY)
        os.dup2(fd, target)
        os.close(fd)
    # A line is shown when it is printed, as on a terminal. (With `python -u`, a line and its
    # newline are two writes, which mix with those of a data loader's processes.)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    # A crash in native code leaves no record: this prints where Python was.
    faulthandler.enable()


def _choose_device(local_rank: int) -> None:
    """Show the script the one GPU that the hosts file gave this worker."""
    devices = os.environ.pop(DEVICES, None)
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[local_rank]


def _run_script(path: str) -> None:
    """As `python path`: argv, sys.path and `__main__` are what the script would find there.

    `runpy.run_path` changes argv[0] and takes `__main__` away at the end, when threads and exit
    handlers of the script may still need it; so it is used for directories and archives only.
    """
    if pkgutil.get_importer(path) is not None:
        runpy.run_path(path, run_name="__main__")
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    file = os.path.abspath(path)
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=file,
        __builtins__=builtins,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", file),
    )
    sys.modules["__main__"] = main
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_module(name: str) -> None:
    """As `python -m name`."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _record(directory: RunDirectory, rank: int, local_rank: int, error: BaseException) -> None:
    """Leave the traceback to the launcher, which shows the first failure's and shows it last."""
    frames = _own_frames(error.__traceback__)
    hook = sys.excepthook
    # The user's hook, or that of an experiment tracker that wants to know of the failure; torch's
    # own, which a process group brings, would only print what the launcher shows.
    is_torchs = getattr(hook, "__module__", "").startswith("torch.")
    if hook is not sys.__excepthook__ and not is_torchs:
        hook(type(error), error, frames)
    record = failure.from_exception(rank, error, frames)
    try:
        failure.write(directory, local_rank, record)
    except OSError:  # a full disk must not hide the error
        sys.__excepthook__(type(error), error, frames)
    if record.secondary:
        _wait_for_the_cause(directory)


def _wait_for_the_cause(directory: RunDirectory) -> None:
    """Stay until the worker that caused the failure has recorded its own, or for a moment.

    The agent ends all workers as soon as one has ended, that one among them. (For one on another
    host the launcher waits.)
    """
    num_workers = int(os.environ["LOCAL_WORLD_SIZE"])
    deadline = time.monotonic() + _PEER_SECONDS
    while time.monotonic() < deadline:
        if not all(record.secondary for record in failure.read(directory, num_workers)):
            break
        time.sleep(0.05)


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return frames


def _exit_code(exit: SystemExit) -> int:
    """The code with which the process will end: as the interpreter decides it."""
    if exit.code is None:
        return 0
    return exit.code & 0xFF if isinstance(exit.code, int) else 1
