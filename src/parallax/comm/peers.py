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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallax.cluster.heartbeats import Heartbeats, PostedError
from parallax.comm.compression import RowFormat
from parallax.comm.header import (
    AS_REQUESTED,
    FIRST_ROOM,
    NO_FAULT,
    Answer,
    Fault,
    Layout,
    Operation,
    Verb,
    grown,
)
from parallax.comm.out_of_band import OutOfBandPulls
from parallax.errors import (
    OutOfStepError,
    ParallaxError,
    PeerError,
    WaitTimeoutError,
    WorkerLostError,
)
from parallax.observability.ledger import Ledger
from parallax.tables.host import Counts, to_host

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
    PREFETCH = "prefetch"


@dataclass(frozen=True)
class HostGroups:
    """Process groups of the workers of one host."""

    ranks: Sequence[int]
    control: dist.ProcessGroup | None
    rows: dist.ProcessGroup | None


class Peers:
    """The group of workers. With one worker, every method answers without a group.

    `control` carries small CPU tensors, `rows` the rows and row gradients of tables, `prefetch` and
    `prefetch_control` the same for the next batch. Operations on a group are matched by their
    order, so each header says which operation it belongs to.
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
        prefetch: dist.ProcessGroup | None = None,
        prefetch_control: dist.ProcessGroup | None = None,
        heartbeats: Heartbeats | None = None,
        out_of_band: OutOfBandPulls | None = None,
        host: HostGroups | None = None,
        layout: Layout | None = None,
        subjects: Sequence[str] = (),
        row_format: RowFormat = RowFormat.FLOAT32,
    ) -> None:
        """`subjects` are what operations can be about, in the same order on every worker."""
        self.rank = rank
        self.num_workers = num_workers
        self._ranks: Sequence[int] = range(num_workers)
        """As messages name the workers."""
        self.ledger = ledger
        self.layout = layout or Layout(max_counts=1, num_flags=0)
        self.step = 0
        self._timeout_seconds = timeout_seconds
        self._control = control
        self._lanes = {Lane.ROWS: rows, Lane.PREFETCH: prefetch}
        self._prefetch_control = prefetch_control
        self._heartbeats = heartbeats
        self.out_of_band = out_of_band
        self.row_format = row_format
        """How rows travel. See [Note: compression] in compression.py."""
        self._ordinals: dict[tuple[Verb, str], int] = {}
        self._numbers = {subject: number for number, subject in enumerate(subjects)}
        self._room = FIRST_ROOM
        self.prefetch_room = FIRST_ROOM
        self._closed = False
        self.merges_host = False
        """Whether the workers of a host pull and push together; the same on all workers. They then
        begin every operation together, before all workers do."""
        self.host = None if host is None else self._of_host(host)
        """The workers of this host, for their part of operations of all workers."""

    def _of_host(self, host: HostGroups) -> Peers:
        found = Peers(
            host.ranks.index(self.rank),
            len(host.ranks),
            ledger=self.ledger,
            timeout_seconds=self._timeout_seconds,
            control=host.control,
            rows=host.rows,
            layout=self.layout,
        )
        found._ranks = host.ranks
        found._numbers = self._numbers
        return found

    def switch_host_merge(self, is_on: bool) -> None:
        """Let the workers of a host pull and push together, or stop it. On all workers."""
        self.merges_host = is_on

    def close(self) -> None:
        self._closed = True
        if self._heartbeats is not None:
            self._heartbeats.close()

    def next_step(self) -> None:
        self.step += 1
        self._ordinals.clear()
        if self._heartbeats is not None:
            self._heartbeats.withdraw_error()

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
        as_requested: bool = False,
        is_met: bool = False,
    ) -> Answer:
        """Tell each worker how many ids of each kind I have for it, and which; hear the same.

        `counts` is by worker and kind. The header also says which operation this is: workers that
        are in different ones all raise, instead of taking each other's rows for their own.
        `as_requested`: the ids are those of the last pull, so they are not sent again.
        `is_met`: those of a host have begun it together already.
        """
        if not is_met:
            self.meet_on_host(operation)
        counts = np.zeros((self.num_workers, 0), np.int64) if counts is None else counts
        ids = torch.empty(0, dtype=torch.int32) if ids is None else ids
        if self.num_workers == 1:
            return Answer(counts, [fault], list(flags), ids, len(ids), np.zeros(1, np.bool_))
        ids = ids.to(torch.int32)
        told_ids = None if as_requested else to_host(ids)
        where = self._where(operation)
        sent = self.layout.pack(where, fault, counts, flags, told_ids, self._room)
        with self.waiting(operation):
            messages = self._swapped(sent)
            words = self.layout.words(messages)
            self._check_together(operation, words)
            sizes = counts.sum(1) * (not as_requested)
            ids = ids[:0] if as_requested else ids
            return self._answer(operation, counts.shape[1], sizes, ids, messages, words)

    def meet_on_host(self, operation: Operation) -> None:
        """Check that the workers of this host are in one operation, if they begin it together."""
        if self.merges_host:
            with self.waiting(operation):
                self.announce_on_host(operation)

    def announce_on_host(
        self, operation: Operation, counts: Counts | None = None, ids: Tensor | None = None
    ) -> Answer | None:
        """Do what `announce` does among the workers of this host. Return None if they are in
        different operations: this worker then goes on to where all workers announce theirs, so that
        all of them learn who is where."""
        assert self.host is not None
        try:
            return self.host.announce(operation, counts, ids=ids)
        except OutOfStepError:
            if operation.verb is Verb.PREFETCH:  # It is not announced to all.
                raise
            return None

    def _where(self, operation: Operation) -> tuple[int, int, int, int]:
        subject = self._numbers[operation.subject]
        return operation.verb, subject, operation.ordinal, operation.step

    def pull_out_of_band(
        self, operation: Operation, counts: Sequence[int], places: Tensor
    ) -> Tensor:
        """Pull rows that the others do not expect to send. See out_of_band.py."""
        assert self.out_of_band is not None
        with self.waiting(operation):
            return self.out_of_band.pull(operation.subject, counts, places)

    def _answer(
        self,
        operation: Operation,
        num_kinds: int,
        sent: Counts,
        ids: Tensor,
        messages: Tensor,
        words: Counts,
    ) -> Answer:
        told, largest = words[:, 7 : 7 + num_kinds], int(words[:, 6].max())
        as_requested = words[:, 6] == AS_REQUESTED
        totals = told.sum(1) * ~as_requested
        if largest <= self._room:
            found = self.layout.ids(messages, totals).to(ids.device)
        else:
            found = self.exchange(ids, sent.tolist(), totals.tolist())
        if operation.verb in (Verb.LOOKUP, Verb.PREFETCH):
            self._room = grown(self._room, largest)
        faults = [(Fault(code), value) for code, value in words[:, 4:6].tolist()]
        flags = self.layout.flags(messages)
        return Answer(told, faults, flags, found, max(largest, 0), as_requested)

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
        """Begin to send row i of a small CPU tensor to worker i, on the prefetch lane."""
        received = torch.empty_like(headers)
        self.ledger.header_bytes += headers[1:].numel() * headers.element_size()
        return received, dist.all_to_all_single(
            received, headers, group=self._prefetch_control, async_op=True
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
        if self._heartbeats is None:
            yield
            return
        self._heartbeats.begin_wait(where)
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
            if self._heartbeats.posted_error is not None:
                self._heartbeats.withdraw_error()
        finally:
            self._heartbeats.end_wait()

    def report(self, error: IndexError | TypeError) -> None:
        """Have the others raise this error too, when their waits for this worker break.

        It holds until a later wait or step of this worker succeeds.
        """
        if self._heartbeats is not None:
            kind = "TypeError" if isinstance(error, TypeError) else "IndexError"
            self._heartbeats.post_error(PostedError(kind, str(error)))

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
        assert self._heartbeats is not None
        reported = [s.error for s in self._heartbeats.statuses() if s.error is not None]
        if reported:
            kind = TypeError if reported[0].kind == "TypeError" else IndexError
            return kind(reported[0].text)
        silent = self._heartbeats.silent_workers()
        statuses = self._heartbeats.statuses()
        me = f"worker {self.rank} waited {waited_seconds:.0f} s in {where}"
        if silent:
            lost = " and ".join(f"worker {rank}" for rank in silent)
            last = "; ".join(str(s) for s in statuses if s.rank in silent)
            return WorkerLostError(f"{me}, but {lost} ended or cannot be reached. {last}")
        absent = [s for s in statuses if s.where != where]
        whom = " and ".join(f"worker {s.rank}" for s in absent) or "the others"
        known = "; ".join(map(str, absent or statuses))
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
