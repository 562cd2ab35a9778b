"""The step of this worker, where a launcher sees it even after the worker was killed."""

from __future__ import annotations

import logging
import mmap

_SIZE_BYTES = 8
_log = logging.getLogger("parallax")


class Beacon:
    """Keeps a number in the first 8 bytes of a file (little-endian); without a path, nowhere.

    The file is mapped into memory: showing a step is a copy of 8 bytes, and what was shown stays
    when the process is killed.
    """

    def __init__(self, path: str | None) -> None:
        self._map: mmap.mmap | None = None
        if path is None:
            return
        try:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE_BYTES)
        except (OSError, ValueError) as error:  # training does not depend on being watched
            _log.warning("cannot show the step in %r: %s", path, error)

    def show(self, step: int) -> None:
        if self._map is not None:
            self._map[:_SIZE_BYTES] = step.to_bytes(_SIZE_BYTES, "little")

    def close(self) -> None:
        """What was shown last stays in the file."""
        if self._map is not None:
            self._map.close()
            self._map = None
