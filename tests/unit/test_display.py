"""What is written does not hold up who has it written."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

from parallax.launch.display import Display
from parallax.launch.output import Screen


class Stuck(io.StringIO):
    """A reader that does not read until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, text: str) -> int:
        self.gate.wait(10)
        return super().write(text)


def test_nothing_waits_for_a_reader_and_nothing_is_lost(tmp_path: Path) -> None:
    stdout = Stuck()
    display = Display(Screen(stdout, io.StringIO(), {}), str(tmp_path))
    display.begin({0: "a"})
    begin = time.monotonic()
    for _ in range(100):
        display.feed(0, "stdout", b"x" * (1 << 16) + b"\n")
    assert display.is_full
    assert time.monotonic() - begin < 5
    stdout.gate.set()
    display.close(is_given_up=lambda: False)
    assert not display.is_full
    assert stdout.getvalue().count("[a worker 0] xxx") == 100
    assert (tmp_path / "worker-0.log").read_text().count("\n") == 100


def test_a_reader_that_never_reads_can_be_given_up() -> None:
    stdout = Stuck()
    display = Display(Screen(stdout, io.StringIO(), {}), None)
    display.feed(0, "stdout", b"line\n")
    display.close(is_given_up=lambda: True)
    stdout.gate.set()


def test_a_log_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    display = Display(Screen(stdout, stderr, {}), str(tmp_path / "absent"))
    display.begin({0: ""})
    display.feed(0, "stdout", b"line\n")
    display.close(is_given_up=lambda: False)
    assert "no more logs are kept in" in stderr.getvalue()
    assert stdout.getvalue() == "[worker 0] line\n"


def test_a_disk_that_is_full_is_told_once() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    display = Display(Screen(stdout, stderr, {}), "/dev")
    display._logs = [open("/dev/full", "w", encoding="utf-8")]  # noqa: SIM115
    display.feed(0, "stdout", b"one\n")
    display.feed(0, "stdout", b"two\n")
    display.close(is_given_up=lambda: False)
    assert stderr.getvalue().count(os.strerror(28)) == 1
    assert stdout.getvalue() == "[worker 0] one\n[worker 0] two\n"
