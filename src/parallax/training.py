"""Training: the objects behind one session."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from parallax import checkpoint
from parallax.checkpoint.progress import Progress
from parallax.cluster.topology import Hosts
from parallax.comm.peers import Peers
from parallax.engine.engine import Engine
from parallax.engine.optimizer_hooks import OptimizerHooks
from parallax.planning.adaptive_plan import AdaptivePlan


@dataclass(frozen=True)
class Training:
    """A model that is set up for training, with its parameters on their routes."""

    hosts: Hosts
    device: torch.device
    peers: Peers
    adaptive_plan: AdaptivePlan
    state: checkpoint.TrainingState
    progress: Progress
    engine: Engine
    hooks: OptimizerHooks
    resources: ExitStack
    """Undoes the set-up, last thing first."""

    def resume(self) -> None:
        """Load the newest checkpoint, if the launcher asks for it. Collective."""
        restored = self.progress.find()
        if restored is not None:
            self._continue_from(restored, resumed=True)

    def load(self, path: Path) -> None:
        """Load a checkpoint. Collective."""
        restored = checkpoint.load(path, self.state.contents(), self.peers)
        self._continue_from(restored, resumed=False)

    def _continue_from(self, restored: checkpoint.Restored, *, resumed: bool) -> None:
        """Restore the rest: parameters and optimizers are restored already."""
        self.state.model.zero_grad()
        self.engine.drop_gradients()
        self.peers.step = restored.step
        self.hooks.set_step(restored.step)
        self.progress.restore(restored, resumed=resumed)
