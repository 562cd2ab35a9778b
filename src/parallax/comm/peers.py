"""The other workers: groups, headers that show who is in which operation, waits that end.

[Note: blame] Only what communication raises is another worker's doing. torch raises a plain
RuntimeError for a broken connection, for a bug in an operation and for a lack of memory, so the
place tells them apart: what a wait on torch's groups raises becomes a `CommunicationError`, and
`Peers.waiting` explains that alone. Errors of torch's stores and of NCCL have types of their own.
Any other error stays what it is, and so does a lack of memory, wherever it is noticed.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallax.comm.board import Board, Report
from parallax.comm.detour import Detours
from parallax.comm.header import (
    FIRST_ROOM,
    NO_FAULT,
    Answer,
    Fault,
    Layout,
    Operation,
    Verb,
    grown,
)
from parallax.errors import (
    OutOfStepError,
    ParallaxError,
    PeerError,
    WaitTimeoutError,
    WorkerLostError,
)
from parallax.ledger import Ledger
from parallax.tables.host import Counts, to_host
from parallax.wire import Wire

_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory")
"""What the CPU's allocator says, and the operating system."""


class CommunicationError(RuntimeError):
    """torch failed to communicate; `Peers.waiting` says with whom. See [Note: blame]."""


@contextmanager
def communicating() -> Iterator[None]:
    """Mark what is raised inside as an error of communication. See [Note: blame]."""
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:
        if _is_out_of_memory(error):
            raise
        raise CommunicationError(str(error)) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return "out of memory" in text or any(words in text for words in _OUT_OF_MEMORY)


class Lane(enum.Enum):
    """Which group carries an exchange."""

    ROWS = "rows"
    AHEAD = "ahead"


class Peers:
    """The group of workers. With one worker, every method answers without a group.

    `control` carries small CPU tensors, `rows` the rows and row gradients of tables, `ahead` what
    belongs to the next batch. Operations on a group are matched by their order, so each header says
    which operation it belongs to.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        *,
        ledger: Ledger,
        timeout_seconds: float,
        control: dist.ProcessGroup | None = None,
        rows: dist.ProcessGroup | None = None,
        ahead: dist.ProcessGroup | None = None,
        control_ahead: dist.ProcessGroup | None = None,
        board: Board | None = None,
        detours: Detours | None = None,
        wire: Wire = Wire.FLOAT32,
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self._ranks: Sequence[int] = range(num_workers)
        """As messages name the workers."""
        self.ledger = ledger
        self.layout = Layout(max_counts=1, num_flags=0)
        self.step = 0
        self._timeout_seconds = timeout_seconds
        self._control = control
        self._lanes = {Lane.ROWS: rows, Lane.AHEAD: ahead}
        self._control_ahead = control_ahead
        self._board = board
        self.detours = detours
        self.meet_inside: Callable[[Operation], None] = lambda operation: None
        """Called before an operation of all workers, which those of a host begin together."""
        self.wire = wire
        """How rows travel. See [Note: wire] in wire.py."""
        self._ordinals: dict[tuple[Verb, str], int] = {}
        self._numbers: dict[str, int] = {}
        self._room = FIRST_ROOM
        self.room_ahead = FIRST_ROOM
        self._closed = False

    def inside(
        self,
        ranks: Sequence[int],
        control: dist.ProcessGroup | None,
        rows: dist.ProcessGroup | None,
    ) -> Peers:
        """Some of the workers, for parts of operations in which all are."""
        found = Peers(
            ranks.index(self.rank),
            len(ranks),
            ledger=self.ledger,
            timeout_seconds=self._timeout_seconds,
            control=control,
            rows=rows,
        )
        found._ranks = ranks
        found.layout, found._numbers = self.layout, self._numbers
        return found

    def name_subjects(self, subjects: Sequence[str]) -> None:
        """Number what operations can be about, in the same way on every worker."""
        self._numbers = {subject: number for number, subject in enumerate(subjects)}

    def close(self) -> None:
        self._closed = True
        if self._board is not None:
            self._board.close()

    def next_step(self) -> None:
        self.step += 1
        self._ordinals.clear()
        if self._board is not None:
            self._board.recover()

    def operation(self, verb: Verb, subject: str) -> Operation:
        """The next operation of this kind in this step."""
        if self._closed:
            raise ParallaxError(
                f"{subject!r} is sharded, and its session is closed: take session.state_dict() or "
                "session.save() before session.close()"
            )
        if subject not in self._numbers:
            self._numbers[subject] = len(self._numbers)
        key = (verb, subject)
        self._ordinals[key] = self._ordinals.get(key, 0) + 1
        return Operation(verb, subject, self._ordinals[key], self.step)

    # Operations ---------------------------------------------------------------------------

    def announce(
        self,
        operation: Operation,
        counts: Counts | None = None,
        *,
        ids: Tensor | None = None,
        flags: Sequence[bool] = (),
        fault: tuple[Fault, int] = NO_FAULT,
        is_met: bool = False,
    ) -> Answer:
        """Tell each worker how many ids of each kind I have for it, and which; hear the same.

        `counts` is by worker and kind. The header also says which operation this is: workers that
        are in different ones all raise, instead of taking each other's rows for their own.
        `is_met`: those of a host have begun it together already.
        """
        if not is_met:
            self.meet_inside(operation)
        counts = np.zeros((self.num_workers, 0), np.int64) if counts is None else counts
        ids = torch.empty(0, dtype=torch.int32) if ids is None else ids
        if self.num_workers == 1:
            return Answer(counts, [fault], list(flags), ids, len(ids))
        where = self._where(operation)
        ids = ids.to(torch.int32)
        sent = self.layout.pack(where, fault, counts, flags, to_host(ids), self._room)
        with self.waiting(operation):
            messages = self._swapped(sent)
            words = self.layout.words(messages)
            self._check_together(operation, words)
            return self._answer(operation, counts, ids, messages, words)

    def _where(self, operation: Operation) -> tuple[int, int, int, int]:
        subject = self._numbers[operation.subject]
        return operation.verb, subject, operation.ordinal, operation.step

    def detour(self, operation: Operation, counts: Sequence[int], places: Tensor) -> Tensor:
        """Pull rows while the others do not expect it. See [Note: detour] in detour.py."""
        assert self.detours is not None
        with self.waiting(operation):
            return self.detours.ask(operation.subject, counts, places)

    def _answer(
        self,
        operation: Operation,
        counts: Counts,
        ids: Tensor,
        messages: Tensor,
        words: Counts,
    ) -> Answer:
        told = words[:, 7 : 7 + counts.shape[1]]
        totals = told.sum(1)
        largest = int(words[:, 6].max())
        if largest <= self._room:
            found = self.layout.ids(messages, totals).to(ids.device)
        else:
            found = self.exchange(ids, counts.sum(1).tolist(), totals.tolist())
        if operation.verb in (Verb.LOOKUP, Verb.AHEAD):
            self._room = grown(self._room, largest)
        faults = [(Fault(code), value) for code, value in words[:, 4:6].tolist()]
        return Answer(told, faults, self.layout.flags(messages), found, largest)

    def _swapped(self, headers: Tensor) -> Tensor:
        """Send row i of a small CPU tensor to worker i; return what each sent."""
        received = torch.empty_like(headers)
        start = time.perf_counter()
        self.wait(dist.all_to_all_single(received, headers, group=self._control, async_op=True))
        self.ledger.header_seconds += time.perf_counter() - start
        self.ledger.header_bytes += headers[1:].numel() * headers.element_size()
        return received

    def exchange(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first `sent[0]` rows of `values` to worker 0, and so on; return what came."""
        result, work = self.start_exchange(values, sent, received)
        self.wait(work)
        return result

    def start_exchange(
        self,
        values: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        lane: Lane = Lane.ROWS,
    ) -> tuple[Tensor, dist.Work | None]:
        """Begin what `exchange` does, to be waited for later."""
        if self.num_workers == 1:
            return values, None
        result = values.new_empty((sum(received), *values.shape[1:]))
        work = dist.all_to_all_single(
            result, values, list(received), list(sent), group=self._lanes[lane], async_op=True
        )
        return result, work

    def start_swap(self, headers: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begin to send row i of a small CPU tensor to worker i, on the lane ahead."""
        received = torch.empty_like(headers)
        self.ledger.header_bytes += headers[1:].numel() * headers.element_size()
        return received, dist.all_to_all_single(
            received, headers, group=self._control_ahead, async_op=True
        )

    def total(self, values: Tensor, reduction: dist.ReduceOp.RedOpType, where: str) -> Tensor:
        """All-reduce a small CPU tensor in place."""
        if self.num_workers > 1:
            with self.waiting(where):
                self.wait(dist.all_reduce(values, reduction, group=self._control, async_op=True))
        return values

    def start_total(self, values: Tensor, reduction: dist.ReduceOp.RedOpType) -> dist.Work | None:
        """Begin what `total` does, to be waited for later."""
        if self.num_workers == 1:
            return None
        work: dist.Work = dist.all_reduce(values, reduction, group=self._control, async_op=True)
        return work

    def gather(self, values: Tensor, where: str) -> list[Tensor]:
        """Each worker's small CPU tensor, all of one shape."""
        if self.num_workers == 1:
            return [values]
        found = [torch.empty_like(values) for _ in range(self.num_workers)]
        with self.waiting(where):
            self.wait(dist.all_gather(found, values, group=self._control, async_op=True))
        return found

    def broadcast(self, values: Tensor, where: str) -> Tensor:
        """Rank 0's small CPU tensor, in place."""
        if self.num_workers > 1:
            with self.waiting(where):
                self.wait(dist.broadcast(values, 0, group=self._control, async_op=True))
        return values

    def spread(self, values: Tensor, owner: int) -> None:
        """An owner's rows to all, in place; inside `waiting`."""
        self.wait(dist.broadcast(values, owner, group=self._lanes[Lane.ROWS], async_op=True))

    def reduce(self, values: Tensor) -> None:
        """Sum over all in place by a ring, as many dense gradients are; inside `waiting`."""
        self.wait(dist.all_reduce(values, group=self._lanes[Lane.ROWS], async_op=True))

    def spread_all(self, tensors: Sequence[Tensor], where: str) -> None:
        """Rank 0's tensors to all, in place; those of one dtype travel together."""
        if self.num_workers == 1:
            return
        with self.waiting(where), torch.no_grad():
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                alike = [tensor for tensor in tensors if tensor.dtype == dtype]
                flat = torch.cat([tensor.reshape(-1) for tensor in alike])
                self.spread(flat, 0)
                for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                    tensor.copy_(part.reshape(tensor.shape))

    def gather_text(self, text: str, where: str) -> list[str]:
        """Each worker's text; nothing more than its length travels if all are empty."""
        data = text.encode()
        sizes = [int(size) for size in self.gather(torch.tensor([len(data)]), where)]
        if not any(sizes):
            return [""] * self.num_workers
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        found = self.gather(padded, where)
        return [bytes(t[:n].tolist()).decode() for t, n in zip(found, sizes, strict=True)]

    # Waits --------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, where: object) -> Iterator[None]:
        """Name the operation that the waits inside belong to. See [Note: blame]."""
        if self._board is None:
            yield
            return
        self._board.enter(where)
        start = time.monotonic()
        try:
            yield
        except PeerError as error:
            error.step = self.step
            raise
        except (CommunicationError, dist.DistError) as error:
            if _is_out_of_memory(error):
                raise
            explained = self._explained(error, str(where), time.monotonic() - start)
            if isinstance(explained, PeerError):
                explained.step = self.step
            raise explained from error
        else:
            if self._board.report is not None:
                self._board.recover()
        finally:
            self._board.leave()

    def report(self, error: IndexError | TypeError) -> None:
        """Have the others raise this error too, when their waits for this worker break.

        It holds until a later wait or step of this worker succeeds.
        """
        if self._board is not None:
            kind = "TypeError" if isinstance(error, TypeError) else "IndexError"
            self._board.fail(Report(kind, str(error)))

    def wait(self, work: dist.Work | None) -> None:
        """Wait for an operation; the group's own timeout ends it."""
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            if _is_out_of_memory(error):
                raise
            raise CommunicationError(str(error)) from error

    def _explained(
        self, error: RuntimeError, where: str, waited_seconds: float
    ) -> PeerError | IndexError | TypeError:
        assert self._board is not None
        reported = [s.report for s in self._board.sightings() if s.report is not None]
        if reported:
            kind = TypeError if reported[0].kind == "TypeError" else IndexError
            return kind(reported[0].text)
        silent = self._board.silent()
        sightings = self._board.sightings()
        me = f"worker {self.rank} waited {waited_seconds:.0f} s in {where}"
        if silent:
            lost = " and ".join(f"worker {rank}" for rank in silent)
            last = "; ".join(str(s) for s in sightings if s.rank in silent)
            return WorkerLostError(f"{me}, but {lost} ended or cannot be reached. {last}")
        absent = [s for s in sightings if s.where != where]
        whom = " and ".join(f"worker {s.rank}" for s in absent) or "the others"
        known = "; ".join(map(str, absent or sightings))
        if waited_seconds < 0.9 * self._timeout_seconds:
            return WorkerLostError(f"{me}, and the connection to {whom} broke: {error}. {known}")
        return WaitTimeoutError(
            f"{me} for {whom} in vain (Config.timeout_seconds = {self._timeout_seconds:g}). "
            f"{known}. "
            "Every worker must do the same lookups, backwards and steps; to let one worker "
            "evaluate alone, give it session.state_dict() in a model of its own"
        )

    def _check_together(self, mine: Operation, told: Counts) -> None:
        if (told[:, :4] == self._where(mine)).all():
            return
        subjects = list(self._numbers)
        for rank, (verb, number, ordinal, step) in enumerate(told[:, :4].tolist()):
            subject = subjects[number] if number < len(subjects) else "something else"
            theirs = Operation(Verb(verb), subject, ordinal, step)
            if theirs != mine:
                raise OutOfStepError(
                    f"worker {self._ranks[self.rank]} is in {mine}, but worker "
                    f"{self._ranks[rank]} is in {theirs}. Every "
                    "worker must do the same lookups, backwards and steps in the same order"
                )
