"""The host process: the launcher's hand on each host, over ssh or as its child.

It starts the host's agent, sends on what the workers print, and ends them all when the launcher
says so, or is gone, or gives no sign of life.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from parallax.cluster import variables
from parallax.launch.channel import Channel, Message, wait
from parallax.launch.host import facts
from parallax.launch.host.lifeline import adopt_orphans
from parallax.launch.host.measuring import Measuring
from parallax.launch.host.reaper import Reaper
from parallax.launch.host.relay import Relay
from parallax.launch.host.rundir import RunDirectory
from parallax.launch.host.supervisor import Supervisor, num_cores
from parallax.launch.host.worker import DEVICES
from parallax.launch.interface import interface_of
from parallax.launch.interrupt import Interrupts
from parallax.launch.job import AgentSpec, HostSpec

_TICK_SECONDS = 0.5
_TASK_TICK_SECONDS = 0.02
_BEAT_SECONDS = 1.0
_DRAIN_SECONDS = 5.0
# More than this is held back in the workers' pipes, as a slow terminal would.
_BACKLOG_BYTES = 4 << 20


def main(spec: dict[str, Any]) -> int:
    """Serve the launcher at the other end of stdin and stdout."""
    channel = Channel(os.dup(0), os.dup(1))
    # Whatever else is printed here must not come between messages.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    channel.mark()
    adopt_orphans()
    with Interrupts() as interrupts:
        process = HostProcess(channel, interrupts)
        try:
            return process.serve(spec)
        finally:
            process.close()


class HostProcess:
    """Does what the launcher asks; nothing in it waits for anybody for long."""

    def __init__(self, channel: Channel, interrupts: Interrupts) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._directory: RunDirectory | None = None
        self._relay: Relay | None = None
        self._supervisor: Supervisor | None = None
        self._reaper: Reaper | None = None
        self._listener: socket.socket | None = None
        self._measuring = Measuring()
        self._lapse_seconds: float | None = None
        self._beat_at = 0.0

    def serve(self, values: dict[str, Any]) -> int:
        try:
            self._spec = _read_spec(values)
            self._lapse_seconds = self._spec.lapse_seconds
            facts.enter_directory(self._spec)
            found = facts.gather(self._spec)
        except facts.RefusalError as refusal:
            self._say({"refused": str(refusal)})
            return 1
        self._channel.send({"ready": asdict(found)})
        while True:
            self._pump()
            if self._is_abandoned():
                if not self._channel.is_closed:
                    print("the launcher gave no sign of life", file=sys.stderr)
                return 1
            if self._supervisor is not None and self._supervisor.look():
                self._end()
                return 0

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self._supervisor is not None:
            self._supervisor.kill()
            self._supervisor.finish()
        if self._relay is not None:
            self._relay.close()
        if self._listener is not None:
            self._listener.close()
        if self._directory is not None:
            shutil.rmtree(self._directory.path, ignore_errors=True)
        if self._reaper is not None:
            self._reaper.close()

    def _pump(self) -> None:
        """Wait for the launcher, the workers or a signal, and do what is to be done."""
        is_full = self._channel.backlog_bytes > _BACKLOG_BYTES
        sources = [] if self._relay is None or is_full else self._relay.readers
        tick_seconds = _TASK_TICK_SECONDS if self._measuring.is_busy else _TICK_SECONDS
        ready = wait([self._channel], [self._interrupts.fileno(), *sources], tick_seconds)
        for fd in ready.intersection(sources):
            assert self._relay is not None
            self._relay.read(fd)
        if self._interrupts.take() and self._supervisor is not None:
            self._supervisor.stop()
        if self._channel.reader in ready:
            for message in self._channel.receive():
                assert isinstance(message, dict)
                self._do(message)
        for answer in self._measuring.answers():
            self._channel.send(answer)
        self._beat()

    def _do(self, message: Message) -> None:
        match message["do"]:
            case "listen":
                self._listen(message["address"], message["port"])
            case "start":
                self._start(message)
            case "stop" if self._supervisor is not None:
                self._supervisor.stop()
            case "kill" if self._supervisor is not None:
                self._supervisor.kill()
            case "clock":
                self._channel.send({"clock": time.time(), "asked": message["asked"]})
            case "serve":
                del message["do"]
                self._measuring.serve(**message)
            case "measure":
                del message["do"]
                self._measuring.measure(**message)

    def _listen(self, address: str, port: int) -> None:
        try:
            self._listener = facts.listen(address, port)
        except facts.RefusalError as refusal:
            self._channel.send({"refused": str(refusal)})
        else:
            self._channel.send({"listening": self._listener.getsockname()[1]})

    def _start(self, message: Message) -> None:
        spec, listener = self._spec, self._listener
        assert spec.program is not None
        self._directory = RunDirectory(tempfile.mkdtemp(prefix="parallax-"))
        self._reaper = Reaper(self._directory)
        self._relay = Relay(self._directory, spec.num_workers, self._channel.send_output)
        for local_rank in range(spec.num_workers):
            self._directory.make_step(local_rank)
        agent = AgentSpec(
            program=spec.program,
            num_workers=spec.num_workers,
            listen_fd=None if listener is None else listener.fileno(),
            **message["agent"],
        )
        environ = _environ(spec, agent.own_address, agent.num_hosts)
        self._supervisor = Supervisor(
            agent, self._directory, environ, listener, spared=[self._reaper.pid]
        )
        if listener is not None:
            listener.close()
            self._listener = None

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + _BEAT_SECONDS
        if self._channel.backlog_bytes < _BACKLOG_BYTES:
            self._channel.send({"steps": self._steps()})

    def _steps(self) -> list[int | None]:
        if self._directory is None:
            return []
        return [self._directory.read_step(rank) for rank in range(self._spec.num_workers)]

    def _is_abandoned(self) -> bool:
        """See [Note: lapse] in `connection`."""
        silence_seconds = time.monotonic() - self._channel.heard_at
        return self._channel.is_closed or (
            self._lapse_seconds is not None and silence_seconds > self._lapse_seconds
        )

    def _end(self) -> None:
        """Tell the launcher how the workers ended, and all that they had to say before it."""
        assert self._supervisor is not None
        assert self._relay is not None
        report = self._supervisor.finish()
        steps = self._steps()
        self._supervisor = None
        self._relay.drain(_DRAIN_SECONDS)
        self._say({"ended": {**report, "steps": steps}})

    def _say(self, message: Message) -> None:
        """Send the last message, however long the launcher takes to read, while it is there."""
        self._channel.send(message)
        while self._channel.backlog_bytes and not self._is_abandoned():
            if self._channel.reader in wait([self._channel], [], _TICK_SECONDS):
                self._channel.receive()


def _read_spec(values: dict[str, Any]) -> HostSpec:
    theirs, ours = values.pop("version"), facts.version_of("parallax-torch") or "unknown"
    if theirs != ours:
        raise facts.RefusalError(
            f"it has parallax {ours} and the launcher has {theirs}: install the same version "
            f"(pip install parallax-torch=={theirs})"
        )
    return HostSpec(**values)


def _environ(spec: HostSpec, own_address: str, num_hosts: int) -> dict[str, str]:
    """What the workers find in their environment, beside what torch's agent gives them."""
    environ = dict(os.environ)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // spec.num_workers)))
    if spec.columns is not None:
        environ.setdefault("COLUMNS", str(spec.columns))
    if spec.resume is not None:
        environ[variables.RESUME] = os.path.abspath(spec.resume)  # in the host's own directory
    if spec.link_rate is not None:
        environ[variables.LINK_RATE] = repr(spec.link_rate)
    if spec.devices:
        environ[DEVICES] = ",".join(spec.devices)
    _choose_interface(environ, spec, own_address, num_hosts)
    return environ


def _choose_interface(
    environ: dict[str, str], spec: HostSpec, own_address: str, num_hosts: int
) -> None:
    """Have gloo and NCCL talk where the hosts reach each other.

    Left to itself gloo takes the address that the host's own name has, which is often a loopback.
    """
    interface = spec.interface or interface_of(own_address)
    if interface is None:
        return
    if spec.interface is None:
        environ[variables.INTERFACE] = interface
    chosen = {"GLOO_SOCKET_IFNAME": interface}
    if num_hosts > 1:
        chosen["NCCL_SOCKET_IFNAME"] = f"={interface}"
    given: Mapping[str, str] = {} if spec.interface else environ
    environ.update({name: value for name, value in chosen.items() if name not in given})
