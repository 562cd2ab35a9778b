"""The workers' output on the user's screen: lines with the worker's name before them."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Mapping
from typing import TextIO

from parallax.launch.host.rundir import Stream

# A program that never ends its line must not fill the launcher's memory.
_LONGEST_LINE = 1 << 20

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_RED = 31
_CLEAR_LINE = "\r\x1b[K"
# Every control sequence but colours: moving the cursor would tear the status line.
_MOVES = re.compile(r"\x1b\[[0-9;?]*[@-ln-~]")
_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[@-~]")


class Lines:
    """Cuts a stream of bytes into lines, each as a terminal would leave it on the screen.

    Text before a carriage return is overwritten by what follows, so of a progress bar only its
    last state remains.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._is_progress = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *lines, rest = (self._rest + self._decoder.decode(data)).split("\n")
        if lines:
            self._is_progress = False
        self._is_progress = self._is_progress or "\r" in rest
        self._rest = _last_state(rest, keep_return=True)
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = ""
        return [_last_state(line) for line in lines]

    def finish(self) -> list[str]:
        """What is left when the stream ends without a newline."""
        rest = _last_state(self._rest + self._decoder.decode(b"", final=True))
        self._rest, self._is_progress = "", False
        return [rest] if rest else []

    @property
    def progress(self) -> str | None:
        """The state of an unfinished line that is being overwritten, if there is one."""
        return _last_state(self._rest) if self._is_progress else None


def _last_state(line: str, *, keep_return: bool = False) -> str:
    shown = line.rstrip("\r")
    start = shown.rfind("\r") + 1
    return line[start:] if keep_return else shown[start:]


class Screen:
    """The launcher's stdout and stderr.

    On a terminal, names are coloured, and the last line says how the job is doing, with worker 0's
    progress. Elsewhere lines are plain and progress shows only its last state.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO, environ: Mapping[str, str]) -> None:
        self._files: dict[Stream, TextIO] = {"stdout": stdout, "stderr": stderr}
        smart = environ.get("TERM") != "dumb"
        self._is_terminal = {name: smart and file.isatty() for name, file in self._files.items()}
        self._has_colour = not environ.get("NO_COLOR")
        self._hosts: Mapping[int, str] = {}
        self._job_status: str | None = None
        self._progress: tuple[Stream, str] | None = None
        self._drawn: tuple[Stream, str] | None = None
        self.is_broken = False
        """Whether the reader of stdout or stderr is gone."""

    def name_hosts(self, hosts: Mapping[int, str]) -> None:
        """Name the host of each worker from now on; "" where it goes without saying."""
        self._hosts = hosts

    def show(self, rank: int, stream: Stream, lines: list[str], progress: str | None) -> None:
        """Print a worker's finished lines, and its unfinished one if it is shown in place."""
        self._see_progress(rank, stream, progress)
        if not lines and self._drawn == self._status():
            return
        self._erase_status()
        if lines:
            self._write(stream, "".join(self._line(rank, stream, line) for line in lines))
        self._draw_status()

    def set_status(self, text: str | None) -> None:
        """Say how the whole job is doing, on a terminal."""
        self._job_status = text
        if self._drawn != self._status():
            self._erase_status()
            self._draw_status()

    def say(self, text: str, *, is_error: bool = False) -> None:
        """Print something of the launcher's own to stderr."""
        if is_error and self._has_colour and self._is_terminal["stderr"]:
            text = _coloured(text.removesuffix("\n"), _RED) + "\n"
        self._erase_status()
        self._write("stderr", text)
        self._draw_status()

    def close(self) -> None:
        """Leave the terminal as it was found."""
        self._job_status = self._progress = None
        self._erase_status()

    def _see_progress(self, rank: int, stream: Stream, progress: str | None) -> None:
        if rank != 0 or not self._is_terminal[stream]:
            return
        if progress is not None:
            self._progress = (stream, progress)
        elif self._progress is not None and self._progress[0] == stream:
            self._progress = None

    def _status(self) -> tuple[Stream, str] | None:
        """What the last line should show: the job, worker 0's progress, or both."""
        job = self._job_status
        if self._progress is not None:
            stream, progress = self._progress
            return (stream, f"{job} | {progress}" if job else f"{self._name(0)}{progress}")
        terminals = [name for name, is_terminal in self._is_terminal.items() if is_terminal]
        return (terminals[-1], job) if job and terminals else None

    def _name(self, rank: int) -> str:
        host = self._hosts.get(rank, "")
        return f"[{host} worker {rank}] " if host else f"[worker {rank}] "

    def _line(self, rank: int, stream: Stream, text: str) -> str:
        name = self._name(rank)
        if not self._is_terminal[stream]:
            return f"{name}{text}\n"
        text = _MOVES.sub("", text)
        if self._has_colour:
            name = _coloured(name, _COLOURS[rank % len(_COLOURS)])
            text = _coloured(text, _RED) if stream == "stderr" else text
        return f"{name}{text}\n"

    def _erase_status(self) -> None:
        if self._drawn is not None:
            self._write(self._drawn[0], _CLEAR_LINE)
        self._drawn = None

    def _draw_status(self) -> None:
        self._drawn = self._status()
        if self._drawn is not None:
            stream, text = self._drawn
            # A status that wraps could not be erased.
            columns = os.get_terminal_size(self._files[stream].fileno()).columns or 80
            self._write(stream, _SEQUENCES.sub("", text)[: columns - 1])

    def _write(self, stream: Stream, text: str) -> None:
        file = self._files[stream]
        try:
            file.write(text)
            file.flush()
        except BrokenPipeError:
            self.is_broken = True
            # What the file still holds would fail again when the interpreter flushes it.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, file.fileno())
            os.close(null)


def _coloured(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"
