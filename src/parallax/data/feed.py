"""What a sharded loader's batches are for: training, or something else."""

from __future__ import annotations

import threading
from collections.abc import Callable

from parallax.data.epochs import Epochs


def _nothing() -> None: ...


class Feed:
    """Follows the batches of one loader, and what the script does between them.

    A loader feeds the training if steps are completed between its batches. So nobody has to say
    which loader evaluates, and in accumulation only the batch after a step counts.
    """

    def __init__(
        self,
        epochs: Epochs | None = None,
        step: Callable[[], int] = int,
    ) -> None:
        self.is_out = False
        """Whether the script has a batch of this loader."""
        self.trains = False
        """Whether a step was completed with the batch that the script had last."""
        self.thread = 0
        """The one that reads the loader."""
        self.before_fetch: Callable[[], None] = _nothing
        self.before_batch: Callable[[], None] = _nothing
        """Called with a batch that comes after a step with the one before, ahead of counting it."""
        self._epochs = epochs or Epochs()
        self._step = step
        self._pass_began = self._handed_out = 0
        self._left: int | None = None
        self._is_dropped = False
        self._done: int | None = None

    def begin(self) -> None:
        """A pass over the loader begins."""
        self.thread = threading.get_ident()
        self._pass_began, self._left, self._is_dropped = self._step(), None, False

    def ask(self, loader_epoch: int) -> None:
        """The script asks for a batch; it is done with the one before."""
        self._return()
        if self.trains:
            self._epochs.check_counted(loader_epoch)
        self.before_fetch()

    def hand_out(self) -> None:
        """The script gets a batch, which the loader's place does not count yet."""
        self.is_out = True
        if self.trains:
            self.before_batch()
        self._handed_out = self._step()

    def leave(self) -> None:
        """The script leaves the loop: the pass is over, or was broken out of."""
        self._return()
        self._is_dropped = self._step() == self._pass_began
        if not self._is_dropped:
            self._left = self._epochs.number
            self._epochs.leave()

    def _return(self) -> None:
        if self.is_out:
            self.is_out, self.trains = False, self._step() > self._handed_out

    # An epoch with several loaders --------------------------------------------------------

    @property
    def is_left(self) -> bool:
        """Whether the script has trained on this loader in this epoch, and left it."""
        return self._epochs.used and self._left == self._epochs.number

    @property
    def is_over(self) -> bool:
        """Whether a restored script begins a new pass, though this one may not be at its end.

        So it is if the epoch is left, or if the pass trained nothing: an evaluation that was
        broken off is not gone on with. Without `session.epochs()` a training that was is.
        """
        return self.is_left or self._is_dropped

    def restore(self, *, is_left: bool) -> None:
        """A checkpoint was loaded; `is_left` is as above, when it was saved."""
        self.is_out = self.trains = self._is_dropped = False
        self._left = None
        self._done = self._epochs.number if is_left else None

    def is_done(self) -> bool:
        """Whether the pass that begins was over before the epoch was interrupted; ask once."""
        done, self._done = self._done, None
        return self._epochs.used and done == self._epochs.number
