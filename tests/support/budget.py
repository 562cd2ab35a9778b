"""Count what one training step costs: Python calls, torch operations and host synchronisations.

The model is like a small DLRM: `num_tables` tables, a batch of ids [samples, tables], and a dense
network. `calls_of` and `operations_of` train it in a process started by `run_workers`, with
Parallax or with plain torch, and return the counts of one step. They are two runs, because the
modes that see operations make Python calls themselves.

All threads count. Python threads get the profile function and the modes as they start, so the
counters are installed before `parallelize()`. Callbacks of torch futures, which run on threads of
C++, get them for the length of the callback. Backward on a CPU runs in the thread that calls it.

A figure is the sum over threads of the thread's median over the steps: work that goes by the clock
and not by the step, such as a heartbeat every second, is not in it.
"""

from __future__ import annotations

import functools
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adagrad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import parallax

NUM_ROWS, DIM, SAMPLES = 1_000, 16, 64
WARM_UP_STEPS, MEASURED_STEPS = 12, 5
SPARE_BATCHES = 3  # Nothing measured is near the loader's end, where no next batch is prefetched.
OWN_FOLDER = str(Path(parallax.__file__).parent)
LOOKUPS = (
    F.embedding,
    F.embedding_bag,
    torch.index_select,
    Tensor.index_select,
    Tensor.__getitem__,
)


class Calls(NamedTuple):
    """Calls that Python makes in a step. Generators count each time they are resumed."""

    own: float
    """Of functions in src/parallax, but not those made to answer a lookup."""
    own_in_lookups: float
    python: float
    """Of any function written in Python, but those of this file."""
    builtin: float
    """Of functions and methods written in C, but those that this file calls."""

    @property
    def all(self) -> float:
        """What cProfile would count."""
        return self.python + self.builtin


class Operations(NamedTuple):
    """What a step asks of torch."""

    operations: float
    """All that a TorchDispatchMode sees."""
    synchronisations: dict[str, float]
    """By kind; those of the optimizer's own function are left out."""

    @property
    def num_synchronisations(self) -> float:
        return sum(self.synchronisations.values())


def calls_of(num_tables: int, engine: str) -> Calls:
    """Count the Python calls of a step of "parallax" or "plain" torch."""
    counter = CallCounter()
    counter.install()
    for counter.is_on in _train(num_tables, engine):
        counter.steps.next()
    counter.remove()
    assert len(counter.steps) == MEASURED_STEPS
    return Calls(*(counter.steps.median(kind) for kind in Calls._fields))


def operations_of(num_tables: int, engine: str) -> Operations:
    """Count the torch operations and host synchronisations of a step."""
    counter = OperationCounter()
    counter.install()
    with counter.modes():
        for counter.is_on in _train(num_tables, engine):
            counter.steps.next()
    assert len(counter.steps) == MEASURED_STEPS
    found = {kind: counter.steps.median(kind) for kind in counter.steps.kinds()}
    operations = found.pop("operations")
    return Operations(operations, {kind: count for kind, count in found.items() if count})


# The training -----------------------------------------------------------------------------


class Net(nn.Module):
    """Tables and a dense network; table t is looked up with column t of the batch."""

    def __init__(self, num_tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(NUM_ROWS, DIM, sparse=True) for _ in range(num_tables)
        )
        self.layers = nn.Sequential(nn.Linear(num_tables * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Tensor) -> Tensor:
        rows = [table(batch[:, place]) for place, table in enumerate(self.tables)]
        return self.layers(torch.cat(rows, 1)).square().mean()


def _train(num_tables: int, engine: str) -> Iterator[bool]:
    """Train, and yield after each step whether the next one is to be counted."""
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # Or Adagrad warns that it is off.
    model = Net(num_tables)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    if engine == "plain":
        yield from _loop(model, optimizer, _loader(num_tables, 1))
        return
    # Nothing adapts: what is counted is a step of a plan that stays.
    with parallax.parallelize(
        model, optimizer, replan=False, min_partitions=1, routes={"tables.*": "sharded"}
    ) as session:
        yield from _loop(model, optimizer, session.shard(_loader(num_tables, session.num_workers)))


def _loader(num_tables: int, num_workers: int) -> DataLoader[Any]:
    """Each sample is a whole batch, so that collating costs the same for any number of tables."""
    generator = torch.Generator().manual_seed(1)
    num_batches = (WARM_UP_STEPS + MEASURED_STEPS + SPARE_BATCHES) * num_workers
    batches: Any = [
        torch.randint(NUM_ROWS, (SAMPLES, num_tables), generator=generator)
        for _ in range(num_batches)
    ]
    return DataLoader(batches, batch_size=1, collate_fn=_only)


def _only(samples: list[Tensor]) -> Tensor:
    return samples[0]


def _loop(model: Net, optimizer: Adagrad, loader: Iterable[Tensor]) -> Iterator[bool]:
    for step, batch in enumerate(loader, 1):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield WARM_UP_STEPS <= step < WARM_UP_STEPS + MEASURED_STEPS


# Counting ---------------------------------------------------------------------------------


class _Steps:
    """Counts by thread and kind, and the same of each step."""

    def __init__(self) -> None:
        self._now: dict[int, Counter[str]] = {}
        self._done: list[dict[int, Counter[str]]] = []

    def here(self) -> Counter[str]:
        """Counts of the running step on the thread that asks."""
        return self._now.setdefault(threading.get_ident(), Counter())

    def next(self) -> None:
        """End a step."""
        done, self._now = self._now, {}
        if done:
            self._done.append(done)

    def __len__(self) -> int:
        return len(self._done)

    def kinds(self) -> set[str]:
        return {kind for step in self._done for of_thread in step.values() for kind in of_thread}

    def median(self, kind: str) -> float:
        threads = {thread for step in self._done for thread in step}
        return sum(
            statistics.median(step.get(thread, Counter())[kind] for step in self._done)
            for thread in threads
        )


class CallCounter:
    """A profile function of all threads.

    A call is one of a lookup if it is made inside the `__torch_function__` of a class of Parallax
    that was given one of LOOKUPS. Backward is not inside it, and counts.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.steps = _Steps()
        self._lookup = threading.local()

    def install(self) -> None:
        _watch_futures(self._profiled)
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def remove(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _hook(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on:
            return
        if event == "call":
            self._count(frame)
        elif event == "c_call" and frame.f_code.co_filename != __file__:
            self.steps.here()["builtin"] += 1
        elif event == "return" and frame is getattr(self._lookup, "frame", None):
            self._lookup.frame = None

    def _count(self, frame: FrameType) -> None:
        file = frame.f_code.co_filename
        if file == __file__:
            return
        counts = self.steps.here()
        counts["python"] += 1
        if not file.startswith(OWN_FOLDER):
            return
        if getattr(self._lookup, "frame", None) is None and _is_lookup(frame):
            self._lookup.frame = frame
        is_inside = getattr(self._lookup, "frame", None) is not None
        counts["own_in_lookups" if is_inside else "own"] += 1


def _is_lookup(frame: FrameType) -> bool:
    """Whether a call begins the `__torch_function__(cls, func, …)` of a lookup."""
    code = frame.f_code
    if code.co_name != "__torch_function__":
        return False
    func = frame.f_locals[code.co_varnames[1]]
    return any(func is lookup for lookup in LOOKUPS)


class OperationCounter:
    """A TorchFunctionMode and a TorchDispatchMode on all threads.

    The dispatch mode sees all operations, but `tolist` is none, and `cpu` is none where tensors are
    on the CPU already; those two the function mode sees.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.steps = _Steps()
        self._thread = threading.local()

    def install(self) -> None:
        _watch_futures(self.modes)
        _watch_threads(self.modes)
        # Before torch puts the hooks around it, with the first Adagrad of this process: what runs
        # in hooks, as Parallax does, is not the optimizer's own.
        own = Adagrad.step
        assert not hasattr(own, "hooked")

        @functools.wraps(own)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._thread.is_updating = True
            try:
                return own(*args, **kwargs)
            finally:
                self._thread.is_updating = False

        Adagrad.step = step  # type: ignore[method-assign]

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The modes on this thread, if it does not have them yet."""
        with ExitStack() as stack:
            if not getattr(self._thread, "has_modes", False):
                stack.enter_context(_FunctionMode(self))
                stack.enter_context(_DispatchMode(self))
                self._thread.has_modes = True
                stack.callback(setattr, self._thread, "has_modes", False)
            yield

    def add_operation(self) -> None:
        if self.is_on:
            self.steps.here()["operations"] += 1

    def add_synchronisation(self, kind: str) -> None:
        if self.is_on and not getattr(self._thread, "is_updating", False):
            self.steps.here()[kind] += 1


class _FunctionMode(TorchFunctionMode):
    def __init__(self, counter: OperationCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.cpu):
            self._counter.add_synchronisation(func.__name__)
        answers = [each for each in types if _has_own_function(each)]
        if answers and torch._C._is_torch_function_enabled():
            # torch would call it too, but with this mode off, which would hide what it calls.
            with self:
                return answers[0].__torch_function__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _has_own_function(kind: type) -> bool:
    """Whether a tensor class answers torch functions in its own way."""
    own, default = (each.__torch_function__ for each in (kind, Tensor))
    return getattr(own, "__func__", default.__func__) is not default.__func__


class _DispatchMode(TorchDispatchMode):
    def __init__(self, counter: OperationCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counter.add_operation()
        kind = _synchronisation(func.overloadpacket, args)
        if kind is not None:
            self._counter.add_synchronisation(kind)
        return func(*args, **(kwargs or {}))


_aten = torch.ops.aten
_SYNCHRONISATIONS = {
    _aten._local_scalar_dense: "item",  # also int(), float(), bool() and `if tensor:`
    _aten.nonzero: "nonzero",
    _aten._unique: "unique",
    _aten._unique2: "unique",
    _aten.unique_dim: "unique",
    _aten.unique_consecutive: "unique",
    _aten.unique_dim_consecutive: "unique",
    _aten.equal: "equal",
    _aten.masked_select: "mask",
}
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)


def _synchronisation(operation: Any, args: Any) -> str | None:
    """The kind of host synchronisation that an operation is on a GPU, if it is one."""
    if operation in _INDEXING:
        masks = (torch.bool, torch.uint8)
        has_mask = any(index is not None and index.dtype in masks for index in args[1])
        return "mask" if has_mask else None
    return _SYNCHRONISATIONS.get(operation)


# Other threads ----------------------------------------------------------------------------


def _watch_threads(watch: Callable[[], Any]) -> None:
    """Run every thread that starts from now on inside `watch()`."""
    run = threading.Thread.run

    def watched(self: threading.Thread) -> None:
        with watch():
            run(self)

    threading.Thread.run = watched  # type: ignore[method-assign]


def _watch_futures(watch: Callable[[], Any]) -> None:
    """Run callbacks of torch futures, which have no thread of Python's, inside `watch()`."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def register(future: Any, callback: Callable[..., Any]) -> Any:
            def watched(*args: Any) -> Any:
                with watch():
                    return callback(*args)

            return method(future, watched)

        return register

    kind = torch._C.Future
    kind.then, kind.add_done_callback = wrap(kind.then), wrap(kind.add_done_callback)
