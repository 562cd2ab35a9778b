"""Messages between the launcher and a host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from parallax.launch.channel import MARK, Channel, Output, wait


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """The launcher's and the host's."""
    (down_reader, down_writer), (up_reader, up_writer) = os.pipe(), os.pipe()
    yield (
        Channel(up_reader, down_writer, awaits_mark=True),
        Channel(down_reader, up_writer),
    )
    for fd in (down_reader, down_writer, up_reader, up_writer):
        with contextlib.suppress(OSError):  # the test may have closed it
            os.close(fd)


def received(channel: Channel) -> list[object]:
    found: list[object] = []
    while channel.reader in wait([channel], [], 0.05):
        found += channel.receive()
        if channel.is_closed:
            break
    return found


def test_messages_arrive_as_they_were_sent(ends: tuple[Channel, Channel]) -> None:
    launcher, host = ends
    host.mark()
    sent = [{"a": [1, None, "ü\udcff\n"]}, Output(7, "stderr", b"\0\xff\n"), {"b": {}}]
    host.send(sent[0])  # type: ignore[arg-type]
    host.send_output(sent[1])  # type: ignore[arg-type]
    host.beat()
    host.send(sent[2])  # type: ignore[arg-type]
    assert received(launcher) == sent
    launcher.send({"do": "stop"})
    assert received(host) == [{"do": "stop"}]


def test_the_greeting_of_a_login_shell_is_passed_over(ends: tuple[Channel, Channel]) -> None:
    launcher, host = ends
    os.write(host.writer, b"Welcome!\n" + MARK[:4] + b"not yet\n" + MARK[:5])
    assert received(launcher) == []
    os.write(host.writer, MARK[5:])
    host.send({"ready": 1})
    assert received(launcher) == [{"ready": 1}]


def test_a_message_in_many_pieces_stays_whole(ends: tuple[Channel, Channel]) -> None:
    launcher, host = ends
    reader, writer = os.pipe()
    source = Channel(reader, writer)
    source.mark()
    source.send({"text": "x" * 50})
    data = os.read(reader, 1 << 16)
    found = []
    for byte in data:
        os.write(host.writer, bytes([byte]))
        found += received(launcher)
    assert found == [{"text": "x" * 50}]
    os.close(reader)
    os.close(writer)


def test_what_does_not_fit_waits_and_nothing_blocks(ends: tuple[Channel, Channel]) -> None:
    launcher, host = ends
    host.mark()
    message = {"text": "y" * (1 << 20)}
    host.send(message)
    assert host.backlog_bytes > 0
    found: list[object] = []
    while not found:
        wait([host], [], 0.05)
        found += received(launcher)
    assert found == [message]
    assert host.backlog_bytes == 0


def test_an_end_that_is_gone_is_noticed_by_readers_and_writers(
    ends: tuple[Channel, Channel],
) -> None:
    launcher, host = ends
    os.close(host.writer)
    assert received(launcher) == []
    assert launcher.is_closed
    os.close(launcher.writer)
    os.close(launcher.reader)
    host.writer = os.open(os.devnull, os.O_WRONLY)
    received(host)
    assert host.is_closed


def test_noise_ends_the_channel_instead_of_filling_the_memory(
    ends: tuple[Channel, Channel],
) -> None:
    launcher, host = ends
    host.mark()
    os.write(host.writer, b"\xff" * 64)
    assert received(launcher) == []
    assert launcher.is_closed


def test_only_what_was_heard_is_a_sign_of_life(ends: tuple[Channel, Channel]) -> None:
    launcher, host = ends
    before = host.heard_at
    received(host)
    assert host.heard_at == before
    launcher.beat()
    received(host)
    assert host.heard_at > before
