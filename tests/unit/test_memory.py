"""How much memory workers may still take."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallax.planning.memory import available_bytes


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/a/b", {}, 8192e3),
        ("0::/a/b", {"a/b/memory.max": "max"}, 8192e3),
        ("0::/a/b", {"a/memory.max": "5000", "a/memory.current": "1000"}, 4000),
        ("0::/a", {"a/memory.max": "9999999999999", "a/memory.current": "1000"}, 8192e3),
        (
            "4:memory:/a",
            {"memory/a/memory.limit_in_bytes": "700", "memory/a/memory.usage_in_bytes": "100"},
            600,
        ),
        (
            "4:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": "700",
                "memory/a/memory.usage_in_bytes": "650",
                "memory/a/memory.stat": "total_active_file 8\ntotal_inactive_file 42",
            },
            100,
        ),
        (
            "0::/a",
            {
                "a/memory.max": "700",
                "a/memory.current": "650",
                "a/memory.stat": "anon 9\nactive_file 20\ninactive_file 30",
            },
            100,
        ),
    ],
)
def test_memory_is_what_machine_and_container_leave(
    tmp_path: Path, line: str, files: dict[str, str], expected: float
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"3:cpu:/x\n{line}\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 8000 kB\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert available_bytes(tmp_path, tmp_path / "groups") == expected
