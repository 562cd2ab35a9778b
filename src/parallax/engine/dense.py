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
"""

from __future__ import annotations

import enum
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.comm.direct import DirectSums
from parallax.comm.peers import Peers, communicating
from parallax.engine.reducer import Reducer, sent_bytes
from parallax.errors import UnsupportedError


class Phase(enum.Enum):
    """What the reducer does."""

    IDLE = "no gradients are expected"
    ARMED = "it expects gradients"
    COMPLETING = "parameters without a gradient get a zero one"


class Arming(enum.Enum):
    """When the reducer begins to expect gradients. See [Note: deferring]."""

    AT_FIRST_END = "at the end of the first backward, which shows whether backwards nest"
    AT_GRADIENT = "with the first gradient"
    AT_END = "at the end of each backward, because they nest"


class DenseRoute:
    """Parameters of which each worker has a copy, and whose gradients are all-reduced."""

    def __init__(
        self,
        peers: Peers,
        group: dist.ProcessGroup | None,
        sums: dist.ProcessGroup | None,
        bucket_megabytes: float | None,
        order: list[str],
    ) -> None:
        """`order` has all names, the same on every worker."""
        self.parameters: dict[str, nn.Parameter] = {}
        self.phase = Phase.IDLE
        self.arming = Arming.AT_FIRST_END
        self._peers = peers
        self._group = group
        self._bucket_megabytes = bucket_megabytes
        self._order = order
        self._strays: set[str] = set()
        """Parameters that the reducer gets with the next step."""
        self._came: dict[str, None] = {}
        """Parameters whose gradients have come since the reducer was armed, in order."""
        self._came_before: list[str] = []
        """The same of those that had come when it was armed."""
        self._reducer: Reducer | None = None
        self._reduced: list[str] = []
        self._direct_sums: DirectSums | None = None
        if group is not None and sums is not None:
            self._direct_sums = DirectSums(group, sums, peers.num_workers)

    def adopt(self, name: str, parameter: nn.Parameter, *, stray: bool = False) -> None:
        """Take a parameter in. A stray is not in the reducer before the next step."""
        self.parameters[name] = parameter
        # In an order that is the same on every worker, whenever a parameter was adopted.
        self.parameters = {n: self.parameters[n] for n in self._order if n in self.parameters}
        if stray:
            self._strays.add(name)

    def release(self, name: str) -> None:
        """Let a parameter go that has become a table."""
        del self.parameters[name]
        self._strays.discard(name)
        # Its gradients are not the reducer's any more, from the next backward's very beginning.
        self._drop_reducer()

    def settle(self) -> None:
        """A step has ended: strays belong to the reducer from now on."""
        self._strays.clear()

    def close(self) -> None:
        self._drop_reducer()
        if self._direct_sums is not None:
            self._direct_sums.close()

    # A backward ---------------------------------------------------------------------------

    def arm(self) -> None:
        """Make the reducer expect gradients. See [Note: arming]."""
        self.phase = Phase.ARMED
        self._came_before = list(self._came)
        self._came.clear()
        wanted = [
            name
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and name not in self._strays
        ]
        if wanted != self._reduced:
            self._make_reducer(wanted)
        if self._reducer is not None:
            self._reducer.arm()

    def arrived(self, name: str) -> None:
        """A parameter has got a gradient."""
        if self.phase is Phase.ARMED and self._reducer is not None and name in self._came:
            self.arming = Arming.AT_END
            raise UnsupportedError(
                f"parameter {name!r} got two gradients in one backward, as one does that several "
                "checkpoints with use_reentrant=True share, and no earlier backward had such "
                "checkpoints. Use them from the first backward on, or use_reentrant=False"
            )
        self._came[name] = None

    def abandon(self) -> None:
        """Forget a backward that has raised: its reducer would wait for the rest of it."""
        self._drop_reducer()
        self.phase = Phase.IDLE

    def complete(self) -> None:
        """Give parameters without a gradient in this backward a zero one."""
        left = dict.fromkeys(name for name in self._reduced if name not in self._came)
        ordered = [name for name in self._came_before if left.pop(name, name) is None]
        # Autograd takes the view first that was made last.
        missing = [self.parameters[name] for name in [*left, *reversed(ordered)]]
        if not missing:
            return
        self.phase = Phase.COMPLETING
        try:
            # With the last of them the reducer waits for all buckets.
            with self._peers.waiting(self._where), communicating(), torch.enable_grad():
                torch.autograd.backward(
                    [parameter.view_as(parameter) for parameter in missing],
                    [torch.zeros_like(parameter) for parameter in missing],
                )
        finally:
            self.phase = Phase.ARMED

    def wait(self) -> None:
        """Wait for the all-reduces of this backward."""
        if self._reducer is not None:
            self._reducer.wait(self._where)
        self.phase = Phase.IDLE
        if self.arming is Arming.AT_FIRST_END:
            self.arming = Arming.AT_GRADIENT

    def forget(self, names: list[str]) -> None:
        """Parameters that have no gradient on any worker have none here either."""
        for name in names:
            if name in self.parameters:
                self.parameters[name].grad = None

    def reduce_strays(self, used: set[str], extra: dict[str, Tensor | None]) -> None:
        """All-reduce what the reducer does not know yet; `extra` is added to the gradients."""
        strays = {n: p for n, p in self.parameters.items() if n in self._strays and n in used}
        for name, parameter in strays.items():
            addend = extra.get(name)
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
            for parameter in strays.values():
                assert parameter.grad is not None
                if self._peers.num_workers > 1:
                    values = parameter.grad.div_(self._peers.num_workers)
                    self._peers.wait(dist.all_reduce(values, group=self._group, async_op=True))
        sizes = sent_bytes(strays, self._peers.num_workers)
        self._peers.ledger.add_shared(*sizes, time.perf_counter() - start)

    # Inside -------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"the all-reduce of dense gradients in step {self._peers.step}"

    def _make_reducer(self, names: list[str]) -> None:
        self._drop_reducer()
        self._reduced = names
        if names and self._group is not None:
            chosen = {name: self.parameters[name] for name in names}
            self._reducer = Reducer(
                self._peers, self._group, chosen, self._bucket_megabytes, self._direct_sums
            )

    def _drop_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
        self._reducer, self._reduced = None, []
