"""Attached commands: streams both ways in frames, with a terminal or without."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Callable
from functools import partial

import pytest
import trio

from image.boxd.protocol import FRAME_HEADER, Frame
from node.errors import GuestError
from node.guest import AttachedCommand, Guest
from node.protocol import AttachBox

from .conftest import eventually, gone

WITHIN = 20.0


def frame(kind: Frame, data: bytes = b"") -> bytes:
    return FRAME_HEADER.pack(kind, len(data)) + data


class Reader:
    """What an attached command has sent so far, by kind."""

    def __init__(self, attached: AttachedCommand) -> None:
        self._attached, self._rest = attached, b""
        self.got = dict.fromkeys(Frame, b"")

    async def until(self, done: Callable[[dict[Frame, bytes]], object]) -> dict[Frame, bytes]:
        with trio.fail_after(WITHIN):
            while not done(self.got):
                data = await self._attached.receive()
                assert data, f"ended with {self.got}"
                self._take(data)
        return self.got

    async def end(self) -> dict[Frame, bytes]:
        return await self.until(lambda got: got[Frame.EXIT])

    def _take(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= FRAME_HEADER.size:
            kind, length = FRAME_HEADER.unpack_from(self._rest)
            if len(self._rest) < FRAME_HEADER.size + length:
                return
            self.got[Frame(kind)] += self._rest[FRAME_HEADER.size :][:length]
            self._rest = self._rest[FRAME_HEADER.size + length :]


async def test_bytes_go_through_a_command_as_they_are(guest: Guest) -> None:
    data = bytes(range(256)) * 8192  # 2 MiB: more than every buffer on the way
    async with guest.attach(AttachBox(cmd="cat; echo bye >&2; exit 3", cwd="/")) as attached, trio.open_nursery() as nursery:

        async def feed() -> None:
            for start in range(0, len(data), 60_000):
                await attached.send(frame(Frame.STDIN, data[start : start + 60_000]))
            await attached.send(frame(Frame.STDIN))

        nursery.start_soon(feed)
        got = await Reader(attached).end()
    assert got[Frame.STDOUT] == data
    assert got[Frame.STDERR] == b"bye\n"
    assert json.loads(got[Frame.EXIT]) == {"exitCode": 3, "signal": None}


async def test_a_terminal_gives_all_output_before_the_exit(guest: Guest) -> None:
    # report 3
    async with guest.attach(AttachBox(cmd="seq 20000", cwd="/", tty=True)) as attached:
        got = await Reader(attached).end()
    assert got[Frame.STDOUT].split() == [b"%d" % n for n in range(1, 20_001)]


async def test_a_terminal_has_a_size_that_follows_and_is_the_command_s_own(guest: Guest) -> None:
    cmd = "trap 'stty size; exit 0' WINCH; stty size; [ -t 0 ] && : > /dev/tty && echo mine; while :; do sleep 0.02; done"
    async with guest.attach(AttachBox(cmd=cmd, cwd="/", tty=True, cols=91, rows=33)) as attached:
        reader = Reader(attached)
        assert b"33 91" in (await reader.until(lambda got: b"mine" in got[Frame.STDOUT]))[Frame.STDOUT]
        await attached.send(frame(Frame.RESIZE, struct.pack("!HH", 120, 40)))
        assert b"40 120" in (await reader.end())[Frame.STDOUT]


async def test_the_end_of_input_reaches_a_terminal(guest: Guest) -> None:
    async with guest.attach(AttachBox(cmd="cat", cwd="/", tty=True)) as attached:
        await attached.send(frame(Frame.STDIN, b"line\n") + frame(Frame.STDIN))
        assert b"line" in (await Reader(attached).end())[Frame.STDOUT]


async def test_a_signal_reaches_the_command(guest: Guest) -> None:
    async with guest.attach(AttachBox(cmd="echo up; exec sleep 60", cwd="/")) as attached:
        reader = Reader(attached)
        await reader.until(lambda got: got[Frame.STDOUT])
        await attached.send(frame(Frame.SIGNAL, b"\x0f"))
        assert json.loads((await reader.end())[Frame.EXIT]) == {"exitCode": None, "signal": "SIGTERM"}


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"\xff" * 64, frame(Frame.EXIT, b"{}"), frame(Frame.SIGNAL, b"\xff"), frame(Frame.SIGNAL), frame(Frame.RESIZE, b"1")],
    ids=["nothing", "no frame", "not a client's", "no such signal", "empty", "short"],
)
async def test_a_client_that_leaves_or_talks_nonsense_takes_the_command_along(guest: Guest, nonsense: bytes) -> None:
    async with guest.attach(AttachBox(cmd="echo $$; exec sleep 60", cwd="/")) as attached:
        pid = int((await Reader(attached).until(lambda got: got[Frame.STDOUT]))[Frame.STDOUT])
        if nonsense:
            await attached.send(nonsense)
    await eventually(partial(gone, pid))


async def test_a_background_child_does_not_hold_up_the_exit(guest: Guest) -> None:
    async with guest.attach(AttachBox(cmd="sleep 60 & echo $!", cwd="/")) as attached:
        with trio.fail_after(2):
            got = await Reader(attached).end()
    os.kill(int(got[Frame.STDOUT]), signal.SIGKILL)


async def test_what_cannot_be_attached_is_refused(guest: Guest) -> None:
    with pytest.raises(GuestError) as caught:
        async with guest.attach(AttachBox(cmd="true", cwd="/no/such")):
            pass
    assert caught.value.problem.code == "cwd_not_found"
