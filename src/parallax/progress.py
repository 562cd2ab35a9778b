"""How far a training has come: saved by schedule, restored, and gone on with."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parallax import checkpoint
from parallax.beacon import Beacon
from parallax.cluster import step_file
from parallax.comm.peers import Peers
from parallax.config import Config
from parallax.data import Epochs, Feed, Loaders

_log = logging.getLogger("parallax")


class Progress:
    """Epochs, places in the data, what the script has attached, and the checkpoints of it all."""

    def __init__(
        self,
        config: Config,
        resume_dir: str | None,
        peers: Peers,
        optimizers: list[Optimizer],
        contents: Callable[[], checkpoint.Contents],
    ) -> None:
        is_first = peers.rank == 0
        self.epochs = Epochs(warns=is_first)
        self.loaders = Loaders(self.epochs)
        self.attached = checkpoint.Attached(warns=is_first)
        self._config = config
        self._resume_dir = resume_dir
        self._peers = peers
        self._optimizers = optimizers
        self._contents = contents
        self._options: list[list[dict[str, Any]]] = []
        """Hyper-parameters of the checkpoint that was loaded, until the next step."""
        self._autosave = self._made_autosave()
        self._beacon = Beacon(step_file())
        self._beacon.show(peers.step)

    def _made_autosave(self) -> checkpoint.Autosave | None:
        config, path = self._config, self._config.checkpoint_dir or self._resume_dir
        if path is None:
            if self._peers.rank == 0 and (config.checkpoint_steps or config.checkpoint_seconds):
                _log.warning("no checkpoints are saved: Config.checkpoint_dir does not say where")
            return None
        return checkpoint.Autosave(
            checkpoint.Folder(Path(path).absolute()),
            checkpoint.Schedule.of(config),
            config.checkpoint_keep,
            self._peers,
            self._contents,
            self.loaders.are_in_use,
        )

    def wants_save(self) -> bool:
        """Whether this worker calls all to a save after this step."""
        return self._autosave is not None and self._autosave.call()

    def before_reduction(self) -> None:
        """The gradients of all workers begin to come together: a save point."""
        if self._autosave is not None:
            self._autosave.before_reduction()

    def feed_of(self, loader: DataLoader[Any]) -> Feed:
        return self.loaders.feed_of(loader, self._new_feed)

    def _new_feed(self) -> Feed:
        feed = Feed(self.epochs, lambda: self._peers.step)
        if self._autosave is not None:
            feed.before_fetch = self._autosave.before_fetch
            feed.before_batch = self._autosave.before_batch
        return feed

    def close(self) -> None:
        self._beacon.close()

    # While training -----------------------------------------------------------------------

    def after_step(self, *, called: bool, is_settled: bool) -> None:
        """An optimizer has stepped; `called` if any worker has called all to a save, `is_settled`
        if no other optimizer has yet to step."""
        if self._autosave is not None:
            self._autosave.after_step(called=called, is_settled=is_settled)

    def end_step(self) -> None:
        self._beacon.show(self._peers.step)
        if self._options:  # what is attached from now on has nothing to take from the checkpoint
            self._options = []
            self.attached.check_all_taken()

    # Going on -----------------------------------------------------------------------------

    def attach(self, name: str, thing: Any) -> None:
        if self.attached.add(name, thing):
            self._restore_options()

    def find(self) -> checkpoint.Restored | None:
        """Load the newest checkpoint, if the launcher asks for it. Collective."""
        if self._resume_dir is None:
            return None
        # Also where this training saves: after another restart the newest one is there.
        paths = [self._resume_dir, self._config.checkpoint_dir or self._resume_dir]
        folders = [checkpoint.Folder(p) for p in dict.fromkeys(Path(p).absolute() for p in paths)]
        found = checkpoint.load_newest(folders, self._contents(), self._peers)
        if self._peers.rank == 0 and found is None:
            _log.info("no checkpoint in %r yet: training begins from nothing", self._resume_dir)
        elif self._peers.rank == 0 and found is not None:
            now, then = self._peers.num_workers, found.num_workers
            _log.info(
                "resumed from %r: step %d, saved by %d workers, loaded by %d",
                *(str(found.path), found.step, then, now),
            )
        return found

    def restore(self, restored: checkpoint.Restored, *, resumed: bool) -> None:
        """Parameters and optimizers are restored; so is the rest now."""
        self._beacon.show(restored.step)
        self.epochs.restore(restored.epoch, resumed=resumed)
        self.loaders.restore(restored.loaders, restored.left)
        self.attached.restore(restored.attached)
        self._options = restored.options
        self._restore_options()
        if self._autosave is not None:
            self._autosave.loaded()

    def _restore_options(self) -> None:
        """A scheduler sets learning rates when it is made: those of the checkpoint stay."""
        for optimizer, groups in zip(self._optimizers, self._options, strict=False):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(options))
