"""How far a training has come: saved by schedule, and restored."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from parallax.checkpoint.autosave import Autosave
from parallax.checkpoint.contents import Restored
from parallax.checkpoint.folder import Folder
from parallax.checkpoint.newest import load_newest
from parallax.checkpoint.schedule import Schedule
from parallax.checkpoint.state import TrainingState
from parallax.cluster.environment import step_file_path
from parallax.cluster.step_file import StepFile
from parallax.comm.peers import Peers
from parallax.config import Config
from parallax.data import LoaderUsage

_log = logging.getLogger("parallax")


class Progress:
    """Saves and restores a training, and writes its step to the launcher's step file."""

    def __init__(
        self,
        config: Config,
        resume_dir: str | None,
        peers: Peers,
        state: TrainingState,
    ) -> None:
        self.resume_dir = resume_dir
        """The folder from which the launcher wants to resume, if any."""
        self.state = state
        self._config = config
        self._peers = peers
        self._options: list[list[dict[str, Any]]] = []
        """Hyper-parameters of the checkpoint that was loaded, until the next step."""
        self._autosave = self._make_autosave()
        self._step_file = StepFile(step_file_path())
        self._step_file.write(peers.step)

    def _make_autosave(self) -> Autosave | None:
        config, path = self._config, self._config.checkpoint_dir or self.resume_dir
        if path is None:
            if self._peers.rank == 0 and (config.checkpoint_steps or config.checkpoint_seconds):
                _log.warning("no checkpoints are saved: Config.checkpoint_dir does not say where")
            return None
        return Autosave(
            Folder(Path(path).absolute()),
            Schedule.of(config),
            config.checkpoint_keep,
            self._peers,
            self.state,
        )

    def usage_of(self, loader: DataLoader[Any]) -> LoaderUsage:
        """Return the object that observes how the script uses a DataLoader."""
        return self.state.loaders.usage_of(loader, self._peers, self._autosave)

    def close(self) -> None:
        self._step_file.close()

    # While training -----------------------------------------------------------------------

    def wants_save(self) -> bool:
        """Return whether this worker asks all to save after this step."""
        return self._autosave is not None and self._autosave.wants_save()

    def call_save(self) -> None:
        """Note that some worker has asked all to save after this step."""
        if self._autosave is not None:
            self._autosave.call_save()

    def before_reduction(self) -> None:
        """Save here if it is due: a reduction begins."""
        if self._autosave is not None:
            self._autosave.before_reduction()

    def after_step(self, *, is_complete: bool) -> None:
        """Check the schedule after an optimizer's step. `is_complete`: all optimizers have made as
        many steps."""
        if self._autosave is not None:
            self._autosave.after_step(is_complete=is_complete)

    def end_step(self) -> None:
        """Write the new number of steps to the step file."""
        self._step_file.write(self._peers.step)
        if self._options:  # Objects that are attached later have no state in the checkpoint.
            self._options = []
            self.state.attached.check_all_taken()

    # Resuming -----------------------------------------------------------------------------

    def attach(self, name: str, thing: Any) -> None:
        """Keep an object of the script in checkpoints, and restore it if one was loaded."""
        if self.state.attached.add(name, thing):
            self._restore_options()

    def find(self) -> Restored | None:
        """Load the newest checkpoint, if the launcher asks for it. Collective."""
        if self.resume_dir is None:
            return None
        # Look also where this training saves: after another restart the newest one is there.
        paths = [self.resume_dir, self._config.checkpoint_dir or self.resume_dir]
        folders = [Folder(p) for p in dict.fromkeys(Path(p).absolute() for p in paths)]
        found = load_newest(folders, self.state.contents(), self._peers)
        if self._peers.rank == 0 and found is None:
            _log.info("no checkpoint in %r yet: training begins from nothing", self.resume_dir)
        elif self._peers.rank == 0 and found is not None:
            now, then = self._peers.num_workers, found.num_workers
            _log.info(
                "resumed from %r: step %d, saved by %d workers, loaded by %d",
                *(str(found.path), found.step, then, now),
            )
        return found

    def restore(self, restored: Restored, *, resumed: bool) -> None:
        """Restore everything but parameters and optimizers, which are restored already."""
        self._step_file.write(restored.step)
        state = self.state
        state.epochs.restore(restored.epoch, resumed=resumed)
        state.loaders.restore(restored.loaders, restored.left)
        state.attached.restore(restored.attached)
        self._options = restored.options
        self._restore_options()
        if self._autosave is not None:
            self._autosave.after_load()

    def _restore_options(self) -> None:
        """Restore hyper-parameters again: a new scheduler sets learning rates of its own."""
        for optimizer, groups in zip(self.state.optimizers, self._options, strict=False):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(options))
