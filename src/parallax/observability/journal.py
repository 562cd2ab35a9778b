"""The journal in a run's folder: what was planned, measured and moved.

    RUN/journal.jsonl    a line for each event, oldest first

Each line is one write. If the last line of an earlier run is incomplete, a newline is written
first. So a crash loses at most the line that was being written. Worker 0 writes the journal;
`parallax plan RUN` reads it without torch.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallax.errors import ConfigError

_log = logging.getLogger("parallax")
NAME = "journal.jsonl"


class Journal:
    """Writes events to a run's folder. Without a folder it does nothing."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._file: int | None = None
        self._folder = folder
        if folder is None:
            return
        path = Path(folder) / NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            self._file = os.open(path, flags, 0o644)
            if _is_torn(self._file):
                os.write(self._file, b"\n")
        except OSError as error:
            raise ConfigError(f"Config.run_dir: cannot write {str(path)!r}: {error}") from error

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def kept(self, kind: str) -> Iterator[dict[str, Any]]:
        """Iterate over events of a kind, also of earlier runs; none if they cannot be read."""
        if self._folder is None:
            return
        with suppress(OSError), (Path(self._folder) / NAME).open(errors="replace") as lines:
            for line in lines:  # Most lines are steps; do not parse those.
                if kind in line:
                    yield from (event for event in _events(line) if event["kind"] == kind)

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line. NaN and infinities become null, because JSON has none."""
        if self._file is None:
            return
        text = _line({"kind": kind, "time": round(time.time(), 3), **fields})
        try:
            if os.write(self._file, text) == len(text):
                return
            why = "only a part of a line could be written"
        except OSError as error:
            why = str(error)
        # Logging failures must not stop training.
        _log.warning("nothing more is written to Config.run_dir %r: %s", str(self._folder), why)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a run, oldest first, without incomplete lines."""
    path = Path(folder) / NAME
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(path)!r}: {error.strerror}. A run's folder is what its script gave "
            "as Config.run_dir"
        ) from error
    return list(_events(text))


def last_run(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events since the last start: several runs may use one folder."""
    starts = [place for place, event in enumerate(events) if event["kind"] == "start"]
    return events[starts[-1] :] if starts else events


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("kind"), str):
            yield event


def _is_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _line(event: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(event, allow_nan=False)
    except ValueError:  # A NaN: to look for one first would take as long as writing.
        text = json.dumps(_finite(event), allow_nan=False)
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
