"""Why a worker ended badly, and which of several failures was the first."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType

from parallax.errors import PeerError
from parallax.launch.host.rundir import RunDirectory, read_json, write_json

# The agent sees the end of a worker up to a poll later than it happened, and notes whole
# seconds; a peer can report the broken connection before that. So a death has a head start.
DEATH_HEAD_START_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The bad end of one worker, or of a host with all of its workers."""

    rank: int
    """The worker's number; of a host's first one."""
    exit_code: int
    """As a shell shows it: 128 + the signal's number for a worker that a signal ended."""
    time_seconds: float
    host: str = ""
    """Its name in the hosts file, if there is one."""
    signal: int | None = None
    error: str = ""
    """The last line of the traceback, or what the script said on exit."""
    traceback: str = ""
    step: int | None = None
    secondary: bool = False
    """Whether another worker caused it."""
    of_host: str = ""
    """What befell the whole host, as a sentence without a full stop."""
    num_workers: int = 1
    """How many workers went with it, from `rank` on."""
    log: str = ""
    """What the host's agent had to say."""

    @property
    def ranks(self) -> range:
        return range(self.rank, self.rank + self.num_workers)

    def describe(self) -> str:
        """One sentence, without a full stop."""
        where = "" if self.step is None else f" at step {self.step}"
        if self.of_host:
            return f"{self.of_host}{where}"
        worker = f"worker {self.rank} on {self.host}" if self.host else f"worker {self.rank}"
        if self.signal is not None:
            return f"{worker} was ended by signal {self.signal}{_signal_name(self.signal)}{where}"
        error = f" ({_shorten(self.error)})" if self.error else ""
        return f"{worker} failed{where} with exit code {self.exit_code}{error}"


def from_exception(rank: int, error: BaseException, frames: TracebackType | None) -> Failure:
    """The failure of a worker whose script was left by `error`; `frames` are the script's own."""
    step = getattr(error, "step", None)
    return Failure(
        rank=rank,
        exit_code=1,
        time_seconds=time.time(),
        error=_last_line(error),
        traceback="".join(traceback.format_exception(type(error), error, frames)),
        step=step if isinstance(step, int) else None,
        secondary=any(isinstance(link, PeerError) for link in _chain(error)),
    )


def from_exit(rank: int, exit_code: int, message: str = "") -> Failure:
    """The failure of a worker whose script asked for an exit code other than 0."""
    return Failure(
        rank=rank,
        exit_code=exit_code,
        time_seconds=time.time(),
        error=message,
    )


def from_death(rank: int, return_code: int, time_seconds: float) -> Failure:
    """The failure of a worker as its parent saw it: `return_code` is −signal, as in subprocess."""
    ended_by = -return_code if return_code < 0 else None
    return Failure(
        rank=rank,
        exit_code=return_code if ended_by is None else 128 + ended_by,
        time_seconds=time_seconds - DEATH_HEAD_START_SECONDS,
        signal=ended_by,
    )


def from_host(host: str, ranks: range, what: str, *, time_seconds: float, log: str = "") -> Failure:
    """The loss of a host, or of its agent, with all of its workers; `what` is said of its name."""
    numbers = ", ".join(map(str, ranks))
    workers = f"worker {numbers}" if len(ranks) == 1 else f"workers {numbers}"
    return Failure(
        rank=ranks[0],
        exit_code=1,
        time_seconds=time_seconds,
        host=host,
        of_host=what.format(workers=workers),
        num_workers=len(ranks),
        log=log,
    )


def write(directory: RunDirectory, local_rank: int, failure: Failure) -> None:
    """Leave the record of this worker's failure for the host process."""
    write_json(directory.failure(local_rank), asdict(failure))


def read(directory: RunDirectory, num_workers: int) -> list[Failure]:
    """Every record that the host's workers have left so far."""
    values = (read_json(directory.failure(rank)) for rank in range(num_workers))
    return [Failure(**value) for value in values if value is not None]


def in_order(
    records: Iterable[Failure], deaths: Iterable[Failure], hosts: Iterable[Failure] = ()
) -> list[Failure]:
    """One failure for each worker or host that failed, the cause of all the others first.

    A worker's own record says more than its death does. What another worker caused comes after
    what was not, and SIGTERM last of all: that is how the agent ends the workers that are left.
    """
    by_rank = {death.rank: death for death in deaths}
    by_rank.update({record.rank: record for record in records})

    def place(failure: Failure) -> tuple[bool, bool, float, int]:
        ended = failure.signal == signal.SIGTERM
        return (ended, failure.secondary, failure.time_seconds, failure.rank)

    return sorted([*by_rank.values(), *hosts], key=place)


def report(failures: list[Failure]) -> str:
    """What the user reads last: the first failure, who followed, and the first one's traceback."""
    first, *others = failures
    followers = sorted({rank for f in others if f.signal != signal.SIGTERM for rank in f.ranks})
    text = f"parallax: {first.describe()}"
    if followers:
        workers = "worker" if len(followers) == 1 else "workers"
        text += f"; {workers} {', '.join(map(str, followers))} failed after it"
    if first.traceback:
        return f"{text}. Its traceback:\n{first.traceback}"
    return f"{text}. It said:\n{first.log}\n" if first.log else f"{text}.\n"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and everything it was raised from or during."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += [link.__cause__, link.__context__]


def _last_line(error: BaseException) -> str:
    # The lines of a SyntaxError that show the source are indented; notes come after the message.
    lines = [line for line in traceback.format_exception_only(error) if not line.startswith(" ")]
    return lines[0].strip() if lines else type(error).__name__


def _shorten(text: str, limit: int = 200) -> str:
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return ""
    hint = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
    return f" ({name}){hint}"
