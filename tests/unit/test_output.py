"""How the bytes of the workers become lines on a screen or in a file."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from parallax.launch.output import Lines, Screen


def test_lines_are_joined_across_reads() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed(b"o\n\n") == ["two", ""]
    assert lines.finish() == []


def test_only_newlines_end_a_line() -> None:
    assert Lines().feed("a\x0bb\u2028c\n".encode()) == ["a\x0bb\u2028c"]


def test_a_partial_last_line_is_kept() -> None:
    lines = Lines()
    assert lines.feed(b"no newline") == []
    assert lines.finish() == ["no newline"]


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    lines = Lines()
    assert lines.feed(b"\xff\n") == ["\ufffd"]
    assert lines.feed("ü".encode()[:1]) == []
    assert lines.finish() == ["\ufffd"]


def test_a_character_cut_by_a_read_stays_whole() -> None:
    lines = Lines()
    lines.feed("ü".encode()[:1])
    assert lines.feed("ü".encode()[1:] + b"\n") == ["ü"]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"\r 1%\r 2%\r 3%\n", " 3%"),
        (b" 1%\r 2%\r\n", " 2%"),
        (b"dos\r\n", "dos"),
        (b"\r\n", ""),
    ],
)
def test_of_overwritten_text_the_last_state_remains(data: bytes, line: str) -> None:
    whole, bytewise = Lines(), Lines()
    assert whole.feed(data) == [line]
    assert [shown for byte in data for shown in bytewise.feed(bytes([byte]))] == [line]


def test_progress_is_what_a_terminal_shows_of_the_unfinished_line() -> None:
    lines = Lines()
    lines.feed(b"plain")
    assert lines.progress is None
    lines.feed(b"\r 1%")
    assert lines.progress == " 1%"
    lines.feed(b"\r 2%\r")
    assert lines.progress == " 2%"
    lines.feed(b"\n")
    assert lines.progress is None


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    lines = Lines()
    shown = [line for _ in range(40) for line in lines.feed(b"x" * (1 << 16))]
    assert shown
    assert len("".join(shown + lines.finish())) == 40 << 16


def test_a_file_gets_plain_lines_on_the_stream_they_came_from() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    screen = Screen(stdout, stderr, {})
    screen.show(2, "stdout", ["a", "b"], None)
    screen.show(0, "stderr", ["c"], None)
    screen.show(0, "stderr", [], "50%")
    screen.close()
    assert stdout.getvalue() == "[worker 2] a\n[worker 2] b\n"
    assert stderr.getvalue() == "[worker 0] c\n"


@contextmanager
def terminal(environ: dict[str, str]) -> Iterator[tuple[Screen, int]]:
    """A screen on a terminal, and the file descriptor from which to read what it shows."""
    master, slave = pty.openpty()
    with open(slave, "w", encoding="utf-8", closefd=True) as file:
        yield Screen(file, file, environ), master
    os.close(master)


def expect(fd: int, shown: bytes) -> None:
    """Read exactly what should be there: a terminal hands it on in pieces, when it likes."""
    read = b""
    while len(read) < len(shown):
        read += os.read(fd, len(shown) - len(read))
    assert read == shown


def test_a_terminal_gets_colours_unless_they_are_refused() -> None:
    with terminal({}) as (screen, fd):
        screen.show(1, "stdout", ["a"], None)
        screen.show(1, "stderr", ["b\x1b[A"], None)
        expect(fd, b"\x1b[32m[worker 1] \x1b[0ma\r\n")
        expect(fd, b"\x1b[32m[worker 1] \x1b[0m\x1b[31mb\x1b[0m\r\n")
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        with terminal(environ) as (screen, fd):
            screen.show(1, "stderr", ["b"], None)
            expect(fd, b"[worker 1] b\r\n")


def test_progress_of_worker_0_stays_below_the_lines() -> None:
    with terminal({"NO_COLOR": "1"}) as (screen, fd):
        screen.show(0, "stderr", [], "50%")
        expect(fd, b"[worker 0] 50%")
        screen.show(1, "stderr", [], "49%")  # only one worker's is shown
        screen.show(1, "stdout", ["line"], None)
        expect(fd, b"\r\x1b[K[worker 1] line\r\n[worker 0] 50%")
        screen.show(0, "stderr", ["100%"], None)
        expect(fd, b"\r\x1b[K[worker 0] 100%\r\n")


def test_a_long_status_is_cut_to_one_line() -> None:
    with terminal({"NO_COLOR": "1", "TERM": "xterm"}) as (screen, fd):
        screen.show(0, "stderr", [], "x" * 500)
        # A new pseudo-terminal does not know its width: 80 are taken, the last one left free.
        expect(fd, b"[worker 0] " + b"x" * 68)
        screen.close()
        expect(fd, b"\r\x1b[K")


def test_a_reader_that_is_gone_is_noticed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as file:
        screen = Screen(file, io.StringIO(), {})
        screen.show(0, "stdout", ["lost"], None)
        assert screen.is_broken
