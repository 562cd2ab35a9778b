"""Text in columns, for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

WIDTH = 100
_GAP = "  "
_NARROWEST = 8


def in_columns(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    cut: Collection[str] = (),
) -> str:
    """Lines of at most `WIDTH` characters; a column that is empty in every row is left out.

    In a row that is shorter than the titles, the last cell runs over the columns that are left.
    The columns named in `right` are aligned to the right; those in `cut` are the first to be made
    narrower where a line would be too long.
    """
    shown = [[printable(cell) for cell in row] for row in rows]
    cells = [row if len(row) == len(titles) else row[:-1] for row in shown]
    kept = [i for i, _ in enumerate(titles) if any(row[i] for row in cells if i < len(row))]
    widths = [max(len(row[i]) for row in [titles, *cells] if i < len(row)) for i in kept]
    widths = _fitted(_fitted(widths, [titles[i] in cut for i in kept]), [True for _ in kept])
    lines = []
    for row in [titles, *shown]:
        is_whole = len(row) == len(titles)
        line = [
            _padded(row[i], width, titles[i] in right)
            for i, width in zip(kept, widths, strict=True)
            if is_whole or i < len(row) - 1
        ]
        lines.append(_GAP.join(line if is_whole else [*line, row[-1]]).rstrip())
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines)


def printable(text: str) -> str:
    """On one line and without control characters: some of it comes from other hosts."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _fitted(widths: Sequence[int], may_cut: Sequence[bool]) -> list[int]:
    """Take from the widest of the columns that may be cut, until the line fits."""
    fitted = list(widths)
    while sum(fitted) + len(_GAP) * (len(fitted) - 1) > WIDTH:
        candidates = ((width, i) for i, width in enumerate(fitted) if may_cut[i])
        width, i = max(candidates, default=(0, 0))
        if width <= _NARROWEST:
            break
        fitted[i] -= 1
    return fitted


def _padded(cell: str, width: int, to_the_right: bool) -> str:
    if len(cell) > width:
        # A name may differ from others at its end only; of words the first say the most.
        tail = 0 if " " in cell else (width - 1) // 2
        cell = f"{cell[: width - 1 - tail]}…{cell[len(cell) - tail :]}"
    return cell.rjust(width) if to_the_right else cell.ljust(width)
