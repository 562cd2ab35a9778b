"""One host of a job, as the launcher sees it."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from dataclasses import asdict, replace
from typing import Any

from parallax.launch import failure, ssh
from parallax.launch.channel import Channel, Message, Output
from parallax.launch.check.links import ClockOffset, clock_offset
from parallax.launch.failure import Failure
from parallax.launch.host.facts import Facts, version_of
from parallax.launch.hosts import Host, is_local
from parallax.launch.job import HostSpec

# [Note: lapse] A host that hears nothing from the launcher for 7 s ends its part of the job at
# once; the launcher gives up a host of which it heard nothing for 8 s. Either beats once a second.
# So when a restart begins, seconds later, nothing of the job runs on a host that was given up.
_LAPSE_SECONDS = 7.0
_LOST_SECONDS = 8.0
_EXIT_SECONDS = 2.0
_KILL_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_STDERR_BYTES = 1 << 16


def spec_of(host: Host, interface: str | None, **values: Any) -> HostSpec:
    """What the host is told of itself, and the values of a job beside it."""
    return HostSpec(
        directory=host.directory or (None if is_local(host) else os.getcwd()),
        environment=dict(host.environment),
        address=host.address,
        interface=host.interface or interface,
        is_remote=not is_local(host),
        lapse_seconds=None if is_local(host) else _LAPSE_SECONDS,
        **values,
    )


class Connection:
    """The process that leads to the host, and what has been heard from there."""

    def __init__(
        self, host: Host, spec: HostSpec, ssh_config: str | None, *, has_name: bool
    ) -> None:
        self.host = host
        self.name = host.name if has_name else ""
        """What to call it; nothing where it is the only one."""
        self.num_workers = spec.num_workers
        self.ranks = range(0)
        self.facts: Facts | None = None
        """What it says of itself, when it is ready."""
        self.listening_port: int | None = None
        self.steps: list[int | None] = []
        self.answer: Message | None = None
        """What it said to what it was last asked."""
        self.clock = ClockOffset(0.0, math.inf)
        """How far its clock is ahead of ours."""
        self.ended: dict[str, Any] | None = None
        """How its workers ended, when they have."""
        self.problem: str | None = None
        """Why it cannot take part, or no longer does: a sentence without a full stop."""
        self.is_stopped = False
        self._is_started = False
        self._lost_at = 0.0
        self._closed_at: float | None = None
        self._beat_at = 0.0
        self._ready_by = time.monotonic() + spec.start_seconds
        self._ended_at = 0.0
        self._num_asked = 0
        self._clock_samples: list[tuple[float, float, float]] = []
        self._stderr = bytearray()
        self._process = ssh.start(host, ssh_config)
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None  # noqa: PT018
        self._stderr_fd = stderr.fileno()
        os.set_blocking(self._stderr_fd, False)
        self.channel = Channel(stdout.fileno(), stdin.fileno(), awaits_mark=True)
        version = version_of("parallax-torch") or "unknown"
        self.channel.send_line({"version": version, **asdict(spec)})

    @property
    def is_ready(self) -> bool:
        """Whether it has said of itself what there is to say."""
        return self.facts is not None and bool(self._clock_samples)

    @property
    def num_clock_samples(self) -> int:
        return len(self._clock_samples)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be heard from it."""
        return self.ended is not None or self.problem is not None

    @property
    def readers(self) -> list[int]:
        """What to wait for beside the channel."""
        return [self._stderr_fd] if self._stderr_fd >= 0 else []

    # What comes ---------------------------------------------------------------------------

    def receive(self, ready: set[int], *, is_held: bool = False) -> list[Output]:
        """Take in what has come; gives the workers' output.

        While it `is_held`, nobody reads: then silence says nothing of the host.
        """
        if is_held:
            self.channel.heard_at = time.monotonic()
        if self._stderr_fd in ready:
            self._read_stderr()
        outputs = []
        if self.channel.reader in ready:
            for message in self.channel.receive():
                if isinstance(message, Output):
                    outputs.append(message)
                else:
                    self._take(message)
        if not self.is_over:
            self._look()
        return outputs

    def _take(self, message: Message) -> None:
        match message:
            case {"ready": values}:
                self.facts = Facts(**values)
                self.ask_clock()
            case {"clock": remote, "asked": asked}:
                self._clock_samples.append((asked, remote, time.time()))
                self.clock = clock_offset(self._clock_samples)
            case {"refused": reason}:
                self.problem = reason
            case {"listening": port}:
                self.listening_port = port
            case {"steps": steps}:
                self.steps = steps
            case {"ended": report}:
                self.ended, self.steps = report, report["steps"]
                self._ended_at = time.time()
            case {"answer": answer, "number": number} if number == self._num_asked:
                self.answer = answer

    def _read_stderr(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._stderr_fd, _STDERR_BYTES)
            self._stderr += data
            del self._stderr[:-_STDERR_BYTES]
            if not data:
                self._stderr_fd = -1

    def _look(self) -> None:
        """See whether it is still there, and tell it that we are."""
        now = time.monotonic()
        if self.channel.is_closed:
            self._see_its_end(now)
        elif not self.is_ready:
            if now > self._ready_by:
                self._lose(ssh.explain(self.host, None, self._said()))
        elif not is_local(self.host) and now > self.channel.heard_at + _LOST_SECONDS:
            self._lose(f"no sign of life for {_LOST_SECONDS:.0f} s")
        elif now > self._beat_at:
            self._beat_at = now + _BEAT_SECONDS
            self.channel.beat()

    def _see_its_end(self, now: float) -> None:
        """The pipes are closed: find out why, from the process and what it says on its way out."""
        if self._closed_at is None:
            self._closed_at = now
        exit_code = self._process.poll()
        if (exit_code is None or self._stderr_fd >= 0) and now < self._closed_at + _EXIT_SECONDS:
            return
        self._lose(ssh.explain(self.host, exit_code, self._said()))

    def _lose(self, problem: str) -> None:
        self.problem = problem
        self._lost_at = time.time() - (time.monotonic() - self.channel.heard_at)

    def _said(self) -> str:
        return self._stderr.decode("utf-8", "replace")

    # What goes ----------------------------------------------------------------------------

    def ask(self, what: str, **values: Any) -> None:
        """Have it do something; `answer` will tell."""
        self._num_asked += 1
        self.answer = None
        self.channel.send({"do": what, "number": self._num_asked, **values})

    def ask_clock(self) -> None:
        """Compare the clocks once more; the answer with the shortest way counts."""
        self.channel.send({"do": "clock", "asked": time.time()})

    def listen(self, address: str, port: int) -> None:
        """Have it open the meeting point; `listening_port` will tell."""
        self.ask("listen", address=address, port=port)

    def start(self, agent: dict[str, Any]) -> None:
        self._is_started = True
        self.ask("start", agent=agent)

    def stop(self, *, at_once: bool = False) -> None:
        """Ask it to end its workers."""
        self.is_stopped = True
        if not self.is_over:
            self.ask("kill" if at_once else "stop")

    def let_go(self) -> None:
        """The host process ends when its input does, and all that it started with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self, timeout_seconds: float) -> None:
        """Wait for its process to end, or end it here; the host sees to its own."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
        for file in (self._process.stdout, self._process.stderr):
            assert file is not None
            file.close()

    # How it ended -------------------------------------------------------------------------

    @property
    def records(self) -> list[Failure]:
        """What its failed workers wrote down."""
        return [] if self.ended is None else [self._placed(r) for r in self.ended["records"]]

    @property
    def deaths(self) -> list[Failure]:
        """What its agent saw of them."""
        deaths = None if self.ended is None else self.ended["deaths"]
        return [self._placed(asdict(failure.from_death(**death))) for death in deaths or []]

    @property
    def losses(self) -> list[Failure]:
        """The loss of the whole host, or of its agent."""
        if self.is_stopped or not self._is_started:
            return []
        if self.problem is not None:
            return [self._lost_host()]
        return [self._lost_agent()] if self.ended and self.ended["deaths"] is None else []

    def _lost_host(self) -> Failure:
        if self.name:
            what = f"host {self.name} ({{workers}}) is lost: {self.problem}"
        else:
            what = f"the process that looks after {{workers}} is lost: {self.problem}"
        return self._loss(what, self._lost_at, log="")

    def _lost_agent(self) -> Failure:
        assert self.ended is not None
        code = self.ended["agent_code"]
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        where = f" on {self.name}" if self.name else ""
        what = f"the agent{where}, which starts {{workers}}, was ended {how}"
        time_seconds = self._ended_at - failure.DEATH_HEAD_START_SECONDS
        return self._loss(what, time_seconds, log=self.ended["agent_log"])

    def _loss(self, what: str, time_seconds: float, log: str) -> Failure:
        loss = failure.from_host(self.name, self.ranks, what, time_seconds=time_seconds, log=log)
        return replace(loss, step=max((s for s in self.steps if s is not None), default=None))

    def _placed(self, values: dict[str, Any]) -> Failure:
        """A worker's failure with its host and step, and its time by the launcher's clock."""
        found = Failure(**values)
        local_rank = found.rank - self.ranks.start
        step = self.steps[local_rank] if 0 <= local_rank < len(self.steps) else None
        return replace(
            found,
            host=self.name,
            step=step if found.step is None else found.step,
            time_seconds=found.time_seconds - self.clock.offset_seconds,
        )
