"""`session.epochs(total)`: a count of epochs that continues after a restore."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from parallax.errors import ConfigError

_log = logging.getLogger("parallax")


class Epochs:
    """The number of the script's epoch, from 0. It is saved in checkpoints.

    It counts the script's loop, while each loader counts its own passes. The two differ if a script
    reads a loader more than once an epoch, or leaves epochs early.
    """

    def __init__(self, *, warns: bool = True) -> None:
        self.number = 0
        self.used = False
        self._left: int | None = None
        self._resumed = False
        self._restored = False
        self._warns = warns

    def up_to(self, total: int) -> Iterator[int]:
        """Iterate over the epochs that are left."""
        if not isinstance(total, int) or total < 0:
            raise ConfigError(f"epochs() takes how many epochs the training has, not {total!r}")
        self.used = True
        if self.number >= total > 0 and self._warns:
            _log.warning(
                "session.epochs(%d): %d epochs are done already, so nothing is left to train",
                total,
                self.number,
            )
        return self._counted(total)

    def _counted(self, total: int) -> Iterator[int]:
        while self.number < total:
            self._restored = False
            yield self.number
            if not self._restored:  # A load inside the loop has set the next epoch.
                self.number += 1

    def leave(self) -> None:
        """Note that the script has left a loop over batches that it trained on."""
        self._left = self.number

    @property
    def is_left(self) -> bool:
        """Whether the script has left the batches of this epoch, and is at its end."""
        return self.used and self._left == self.number

    def restore(self, number: int, *, resumed: bool = False) -> None:
        """Continue with this epoch. `resumed`: the launcher has resumed the job."""
        self.number, self._left = number, None
        self._restored, self._resumed = True, resumed

    def check_counted(self, loader_epoch: int) -> None:
        """Warn once if a resumed script counts its epochs from 0 again."""
        if self._resumed and loader_epoch > 0 and not self.used and self._warns:
            _log.warning(
                "this job was resumed in epoch %d of its data, but the script does not count "
                "epochs with the session: `for epoch in range(n)` begins with 0 again. Write "
                "`for epoch in session.epochs(n):`",
                loader_epoch,
            )
        self._resumed = False
