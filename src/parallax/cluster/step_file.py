"""The step file: where a launcher reads this worker's step, even after the worker was killed."""

from __future__ import annotations

import logging
import mmap

_SIZE_BYTES = 8
_log = logging.getLogger("parallax")


class StepFile:
    """Writes the number of steps to the first 8 bytes of a file (little-endian).

    The file is mapped into memory: a write copies 8 bytes, and the number stays in the file when
    the process is killed. Without a path nothing is written.
    """

    def __init__(self, path: str | None) -> None:
        self._map: mmap.mmap | None = None
        if path is None:
            return
        try:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE_BYTES)
        except (OSError, ValueError) as error:  # Training must not depend on the launcher's file.
            _log.warning("cannot show the step in %r: %s", path, error)

    def write(self, step: int) -> None:
        """Replace the number in the file."""
        if self._map is not None:
            self._map[:_SIZE_BYTES] = step.to_bytes(_SIZE_BYTES, "little")

    def close(self) -> None:
        """Unmap the file. The last number stays in it."""
        if self._map is not None:
            self._map.close()
            self._map = None
