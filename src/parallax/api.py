"""The public interface: parallelize() and Session."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parallax import checkpoint
from parallax.checkpoint.progress import Progress
from parallax.cluster.environment import find_place, resume_dir
from parallax.cluster.topology import Hosts
from parallax.comm.agreement import Agreement
from parallax.config import Config
from parallax.data import ShardedLoader
from parallax.engine.clip import clip_norm
from parallax.engine.ownership import check_arguments
from parallax.engine.trained_model import TrainedModel
from parallax.errors import ConfigError
from parallax.observability.ledger import Ledger
from parallax.planning.plan import Plan
from parallax.setup import set_up
from parallax.tables.table import Table

_log = logging.getLogger("parallax")
_open: weakref.WeakSet[Progress] = weakref.WeakSet()
"""The trainings of sessions that are not closed. They live as long as their optimizers, also if the
script drops the session."""


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    config: Config | str | Path | None = None,
    **overrides: Any,
) -> Session:
    """Make `model` and `optimizer` train data-parallel, in place. Collective.

    Call it in the same way on every worker, after the model is built and moved to its device. All
    workers start with rank 0's parameters and buffers. With one process training is unchanged.
    `config` is a `Config` or a TOML file; fields of `Config` can also be given as keywords.
    """
    chosen = config if isinstance(config, Config) else Config.load(config) if config else Config()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return Session(model, optimizers, chosen.replace(**overrides))


class Session:
    """A model in data-parallel training, from `parallelize()` to `close()`."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], config: Config) -> None:
        check_arguments(model, optimizers)
        _check_free(model)
        self.model = model
        self.optimizers = optimizers
        self.config = config
        self.ledger = Ledger(config.ledger_steps)
        place = find_place()
        folder = _free_resume_dir()
        trained = TrainedModel.of(model, optimizers, config, place.num_workers)
        self._training = set_up(trained, config, place, self.ledger, folder)
        self._engine = self._training.engine
        self._peers = self._training.peers
        _open.add(self._training.progress)
        try:
            self._training.resume()
        except BaseException:
            self.close()
            raise
        self.ledger.begin()

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._peers.rank

    @property
    def num_workers(self) -> int:
        """The number of workers on all hosts."""
        return self._peers.num_workers

    @property
    def local_rank(self) -> int:
        """This worker's number on its host, from 0."""
        return self.hosts.local_rank

    @property
    def hosts(self) -> Hosts:
        """The workers of each host; this one's are `session.hosts.workers[session.hosts.index]`."""
        return self._training.hosts

    @property
    def device(self) -> torch.device:
        """The device of this worker's model, on which its batches belong."""
        return self._training.device

    @property
    def step(self) -> int:
        """The number of steps that the optimizer has made."""
        return self._peers.step

    @property
    def plan(self) -> Plan:
        """The route of each parameter and why, with predicted and measured bytes and seconds."""
        return self._training.adaptive_plan.observed

    def shard(
        self,
        loader: DataLoader[Any],
        *,
        split: bool = False,
        ids: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> ShardedLoader:
        """Return this worker's share of every global batch of a DataLoader. Collective.

        By default the loader's batch size is each worker's, as with DDP. With `split=True` it is
        the size of the global batch, which the workers share. No sample is lost or doubled; a
        worker with none left gets an empty batch, which counts for nothing.

        `ids` names ids that `forward` computes from a batch (hashed n-grams, sampled negatives), so
        that their rows are prefetched too: table → a function of the batch that returns them, or
        a list with the ids of each lookup. It must be deterministic; for sampled negatives let
        `forward` use what the function returned. A lookup with other ids is still exact.
        """
        sharded = ShardedLoader(
            loader,
            Agreement(self._peers),
            split=split,
            consumer=self._engine,
            usage=self._training.progress.usage_of(loader),
            ids=ids,
        )
        self._training.state.loaders.add(sharded)
        return sharded

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs that are left of `total`, from 0 or from the restored one.

            for epoch in session.epochs(10):
                for batch in loader: ...

        After a restore the loop begins with the epoch that was interrupted, and sharded loaders
        continue in the middle of it. The number is kept in checkpoints. An epoch counts as done
        when the script has left its batches, at their end or by a `break`.
        """
        return self._training.state.epochs.up_to(total)

    def attach(self, name: str, thing: Any) -> None:
        """Keep an object of the script in checkpoints, such as a scheduler or a GradScaler.

        It needs `state_dict()`, which returns plain values, and `load_state_dict()`. Rank 0's state
        is saved, and every worker restores it: at once, if a checkpoint was loaded before. A name
        that the checkpoint does not have, or that is never attached, is a warning.
        """
        if thing is self.model or any(thing is each for each in self.optimizers):
            raise ConfigError(f"{name!r} is in every checkpoint already: do not attach() it")
        self._training.progress.attach(name, thing)

    def weight(self, count: float) -> None:
        """Set this worker's number of samples or tokens for the next backwards. Collective.

        Its mean loss then has the weight count/Σcounts. Call it before backward; it is valid until
        `optimizer.step()` or the next batch of `shard()`.
        """
        self._engine.weight.set_by_hand(count)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this worker; the next backward outside reduces them."""
        with self._engine.backward.no_sync():
            yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of all gradients, dense and sharded; return the norm before. Collective.

        Only scalars are exchanged.
        """
        self._training.hooks.reduce_pending()
        dense = [p for p in self.model.parameters() if not isinstance(p, Table)]
        return clip_norm(
            [p.grad for p in dense if p.grad is not None],
            self._engine.tables.groups,
            self._peers,
            max_norm,
            float(norm_type),
            error_if_nonfinite,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full, plain state dict on rank 0, and {} elsewhere. Collective.

        It has the model's original names. `Model().load_state_dict(state)` takes it, so rank 0 can
        evaluate alone, in another model, while the others continue.
        """
        return self._training.state.state_dict()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that loads at any number of workers. Collective, atomic."""
        checkpoint.save(Path(path), self._training.state.contents(), self._peers)

    def load(self, path: str | Path) -> None:
        """Restore parameters, optimizers, random numbers and the place in the data. Collective.

        A checkpoint that does not fit, or is damaged, raises and changes nothing. Gradients are
        dropped, because they do not belong to the restored parameters.
        """
        self._training.load(Path(path))

    def close(self) -> None:
        """End the session and release the model; another may begin. Local, not collective."""
        if self._training.progress in _open:
            _open.discard(self._training.progress)
            self._training.resources.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session(rank={self.rank}, num_workers={self.num_workers}, step={self.step})"


def _check_free(model: nn.Module) -> None:
    if any(progress.state.model is model for progress in _open):
        raise ConfigError(
            "this model is parallelized already; use the session it has, or session.close() first"
        )


def _free_resume_dir() -> str | None:
    """Return the folder of `--resume`, unless another session uses it: it has the checkpoints of
    one model only."""
    asked = resume_dir()
    if asked is not None and any(progress.resume_dir == asked for progress in _open):
        _log.warning(
            "--resume %r belongs to the session that is open already; this one begins from nothing",
            asked,
        )
        return None
    return asked
