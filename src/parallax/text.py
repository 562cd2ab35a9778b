"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def size(size_bytes: float | None) -> str:
    if size_bytes is None:
        return "not yet"
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    raise AssertionError("unreachable")


def rate(bytes_per_second: float) -> str:
    """Of a link, as they are sold."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table under its first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("─" * width for width in [*widths, len(rows[0][-1])]))
    return lines
