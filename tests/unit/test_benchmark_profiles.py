"""What a profile makes of the lines of `perf`."""

from __future__ import annotations

import pytest

from benchmarks.profiles import Profile, shares_of, table

REPORT = """# Overhead;Shared Object;Symbol
 21.00% ;libpython3.11.so.1.0 ;[.] _PyEval_EvalFrameDefault
 30.00% ;libtorch_cpu.so      ;[.] at::native::index(a; b)
  5.00% ;libc10.so            ;[.] c10::x
  4.00% ;libc.so.6            ;[.] memcpy
 20.00% ;[kernel.kallsyms]    ;[k] tcp_sendmsg
 15.00% ;[kernel.kallsyms]    ;[k] pv_native_safe_halt
  5.00% ;[vdso]               ;[.] clock_gettime
"""


def test_lines_are_summed_by_kind() -> None:
    found = shares_of(REPORT)
    expected = {"Python": 0.21, "torch": 0.35, "C library": 0.04, "kernel": 0.2}
    assert found == pytest.approx({**expected, "idle": 0.15, "other": 0.05})


def test_a_table_has_milliseconds_of_a_worker() -> None:
    """Two processors are busy for 0.1 s each; four workers share them."""
    text = table("lm", "1gbit", [Profile("Parallax", 0.1, 4, shares_of(REPORT), 2)])
    line = "| Parallax | 100.0 ms | 10.5 | 17.5 | 2.0 | 10.0 | 2.5 | 7.5 |"
    assert text.splitlines()[-1] == line
    assert "| engine | step | Python | torch | C library | kernel | other | idle |" in text
