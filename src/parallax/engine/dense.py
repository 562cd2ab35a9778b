"""The all-reduce route: torch's own reducer, armed by the first gradient of each backward.

[Note: arming] DistributedDataParallel prepares its reducer in `forward`, and so leaves gradients
unsynchronised when a script reaches backward by another way. Here no forward is needed: the hook
that runs after a parameter's first gradient arms the reducer, just before the reducer's own hook
on that parameter. At the end of the backward, parameters that got no gradient in it are given a
zero one, so that the reducer always finishes; one that has no gradient on any worker gets its
None back. Each reduction therefore averages exactly what is in `.grad` on every worker.

[Note: deferring] The reducer takes one gradient of a parameter in a backward, but a parameter that
two reentrant checkpoints share gets two. Where backwards nest, the reducer is therefore armed at
the end only, when all gradients have come; it gets them in the order in which they came, of which
it makes its buckets. The first backward shows whether backwards nest, so it is reduced at its end
too. A backward that raises leaves a reducer that waits for the rest: the next one gets a new one.

[Note: scale] Worker i's mean loss counts n_i/Σn. The reducer averages over N workers, so worker i
multiplies its gradients by n_i·N/Σn, as they arrive and only if that is not 1. Gradients that are
accumulated over several backwards keep each its own weight, and reducing twice changes nothing,
because the weights of the workers sum to N.

[Note: copies] Of what goes in buckets only copies are divided, and they are copied back into
gradients: torch may have two gradients share memory, and views of buckets, which would save copies,
would change under a script that keeps a gradient while the next backward runs.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from parallax import cost
from parallax.comm.direct import DirectSums
from parallax.comm.peers import Peers, communicating
from parallax.errors import UnsupportedError


class DenseRoute:
    """Parameters of which each worker has a copy, and whose gradients are all-reduced."""

    def __init__(
        self,
        peers: Peers,
        group: dist.ProcessGroup | None,
        sums: dist.ProcessGroup | None,
        bucket_megabytes: float | None,
        begin: Callable[[], float],
        scale: Callable[[], float],
        order: list[str],
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self._peers = peers
        self._group = group
        self._bucket_megabytes = bucket_megabytes
        self._begin = begin
        self._scale = scale
        self._order = order  # the same on every worker, whenever a parameter was adopted
        self._strays: set[str] = set()
        self._handles: dict[str, list[Any]] = {}
        self._fired: dict[str, None] = {}
        """Parameters whose gradients have come since the reducer was armed, in order."""
        self._came_before: list[str] = []
        """The same of those that had come when it was armed."""
        self._reduced: list[str] = []
        self._sent_bytes = self._sent_of([])
        self._engine: DistributedDataParallel | None = None
        self._works: list[dist.Work] = []
        self._directs: DirectSums | None = None
        if group is not None and sums is not None:
            self._directs = DirectSums(group, sums, peers.num_workers)
        self._is_direct = False
        """Whether all that is reduced goes directly. See [Note: direct] in direct.py."""
        self._summed: list[Future[None]] = []
        self._completing = False
        self._is_laid_out = False
        """Whether the reducer has arranged its buckets by the order of the first gradients."""
        self.is_armed = False
        """The reducer expects gradients."""
        self._has_reduced = False
        self._is_nested = False

    @property
    def starts_early(self) -> bool:
        """Whether to arm with the first gradient, not the last. See [Note: deferring]."""
        return self._has_reduced and not self._is_nested

    def nests(self) -> None:
        """A backward ran inside another one."""
        self._is_nested = True

    def adopt(self, name: str, parameter: nn.Parameter, *, stray: bool = False) -> None:
        """Take a parameter in. A stray is not in the reducer before the next step."""
        self.parameters[name] = parameter
        # In an order that is the same on every worker, whenever a parameter was adopted.
        self.parameters = {n: self.parameters[n] for n in self._order if n in self.parameters}
        if stray:
            self._strays.add(name)
        self._hook(name, parameter)

    def release(self, name: str) -> None:
        """Let a parameter go that has become a table."""
        del self.parameters[name]
        self._strays.discard(name)
        self._unhook(name)
        # Its gradients are not the reducer's any more, from the next backward's very beginning.
        self._drop_engine()

    def settle(self) -> None:
        """A step has ended: strays belong to the reducer from now on."""
        self._strays.clear()

    def close(self) -> None:
        self._drop_engine()
        if self._directs is not None:
            self._directs.close()
        for name in list(self._handles):
            self._unhook(name)

    # A backward ---------------------------------------------------------------------------

    def arm(self) -> None:
        """Make the reducer expect gradients. See [Note: arming]."""
        self.is_armed = True
        self._came_before = list(self._fired)
        self._fired.clear()
        wanted = [
            name
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and name not in self._strays
        ]
        if wanted != self._reduced:
            self._build_engine(wanted)
        if self._engine is not None:
            reducer = self._engine.reducer
            if not self._is_laid_out:
                where = f"laying out gradient buckets in step {self._peers.step}"
                with self._peers.waiting(where), communicating():
                    self._is_laid_out = bool(reducer._rebuild_buckets())
            reducer.prepare_for_backward([])

    def abandon(self) -> None:
        """Forget a backward that has raised: its reducer would wait for the rest of it."""
        self._drop_engine()
        self._works, self._summed = [], []
        self.is_armed = False

    def complete(self) -> None:
        """Give parameters without a gradient in this backward a zero one."""
        left = dict.fromkeys(name for name in self._reduced if name not in self._fired)
        ordered = [name for name in self._came_before if left.pop(name, name) is None]
        # Autograd takes the view first that was made last.
        missing = [self.parameters[name] for name in [*left, *reversed(ordered)]]
        if missing:
            self._completing = True
            where = f"the all-reduce of dense gradients in step {self._peers.step}"
            try:
                # With the last of them the reducer waits for all buckets.
                with self._peers.waiting(where), communicating(), torch.enable_grad():
                    torch.autograd.backward(
                        [parameter.view_as(parameter) for parameter in missing],
                        [torch.zeros_like(parameter) for parameter in missing],
                    )
            finally:
                self._completing = False

    def wait(self) -> None:
        """Wait for the all-reduces of this backward."""
        works, self._works = self._works, []
        summed, self._summed = self._summed, []
        start = time.perf_counter()
        with self._peers.waiting(f"the all-reduce of dense gradients in step {self._peers.step}"):
            for work in works:
                self._peers.wait(work)
            for each in summed:
                each.result()
        if self._engine is not None:
            self._peers.ledger.add_shared(*self._sent_bytes, time.perf_counter() - start)
        self.is_armed = False
        self._has_reduced = True

    def forget(self, names: list[str]) -> None:
        """Parameters that have no gradient on any worker have none here either."""
        for name in names:
            if name in self.parameters:
                self.parameters[name].grad = None

    def reduce_strays(self, used: set[str], extra: dict[str, Tensor | None]) -> None:
        """All-reduce what the reducer does not know yet; `extra` is added to the gradients."""
        strays = [name for name in self._order if name in self._strays and name in used]
        for name in strays:
            parameter, addend = self.parameters[name], extra.get(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if addend is not None:
                parameter.grad = parameter.grad + addend  # Others may share its memory.
        if not strays:
            return
        start = time.perf_counter()
        with self._peers.waiting(
            f"the all-reduce of new dense gradients in step {self._peers.step}"
        ):
            for name in strays:
                gradient = self.parameters[name].grad
                assert gradient is not None
                if self._peers.num_workers > 1:
                    self._peers.wait(self._sum(gradient.div_(self._peers.num_workers)))
        self._peers.ledger.add_shared(*self._sent_of(strays), time.perf_counter() - start)

    # Inside -------------------------------------------------------------------------------

    def _hook(self, name: str, parameter: nn.Parameter) -> None:
        def scaled(gradient: Tensor) -> Tensor | None:
            scale = 1.0 if self._completing else self._scale()
            if scale == 1.0:
                return None
            # A worker without samples may have NaN here: its gradient is zero, not zero times it.
            return torch.zeros_like(gradient) if scale == 0.0 else gradient * scale

        def arrived(_: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # the reducer takes dense ones only
            if not self._completing:
                self._begin()
                if self.is_armed and self._engine is not None and name in self._fired:
                    self._refuse_second(name)
                self._fired[name] = None

        # Frozen parameters have hooks too, for the day they are unfrozen.
        needs = parameter.requires_grad
        parameter.requires_grad_(True)
        self._handles[name] = [
            parameter.register_hook(scaled),
            parameter.register_post_accumulate_grad_hook(arrived),
        ]
        parameter.requires_grad_(needs)

    def _refuse_second(self, name: str) -> NoReturn:
        self._is_nested = True
        raise UnsupportedError(
            f"parameter {name!r} got two gradients in one backward, as one does that several "
            "checkpoints with use_reentrant=True share, and no earlier backward had such "
            "checkpoints. Use them from the first backward on, or use_reentrant=False"
        )

    def _unhook(self, name: str) -> None:
        for handle in self._handles.pop(name):
            handle.remove()

    def _build_engine(self, names: list[str]) -> None:
        self._drop_engine()
        self._reduced, self._sent_bytes = names, self._sent_of(names)
        size_bytes = sum(self.parameters[name].nbytes for name in names)
        self._is_direct = self._directs is not None and size_bytes <= cost.DIRECT_BYTES
        if not names or self._peers.num_workers == 1:
            return
        holder = nn.Module()
        holder.held = nn.ParameterList([self.parameters[name] for name in names])
        self._engine = DistributedDataParallel(
            holder,
            process_group=self._group,
            bucket_cap_mb=self._bucket_megabytes,
            init_sync=False,
        )
        self._is_laid_out = False
        self._engine.register_comm_hook(None, self._reduce_bucket)

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.reducer._remove_autograd_hooks()
            self._engine = None
        self._reduced, self._sent_bytes = [], self._sent_of([])

    def _reduce_bucket(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        values = bucket.buffer().div_(self._peers.num_workers)  # See [Note: copies].
        if self._directs is not None and self._is_direct:
            done, summed = self._directs.start(values)
            self._summed.append(summed)
            return done
        work = self._sum(values)
        self._works.append(work)
        return work.get_future().then(lambda done: done.value()[0])

    def _sum(self, values: Tensor) -> dist.Work:
        return dist.all_reduce(values, group=self._group, async_op=True)  # type: ignore[no-any-return]

    def _sent_of(self, names: list[str]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """Return names, and bytes that go each way when these are reduced."""
        sizes = [
            cost.allreduce_bytes(self.parameters[name].nbytes, self._peers.num_workers)
            for name in names
        ]
        return tuple(names), np.array(sizes, np.float64)
