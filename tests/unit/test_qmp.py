"""The monitor's client against a fake QEMU at the other end of a socket pair."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio

from node.errors import VmError
from node.vmm.qmp import MAX_EVENTS, MAX_LINE, Monitor

GREETING: dict[str, Any] = {"QMP": {"version": {}, "capabilities": []}}


class FakeQemu:
    """The far end: says what it is told to, and hears one command at a time."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock
        self._heard = b""

    async def say(self, *messages: Any) -> None:
        for message in messages:
            await self.say_bytes(json.dumps(message).encode() + b"\r\n")

    async def say_bytes(self, data: bytes) -> None:
        await trio.SocketStream(self._sock).send_all(data)

    async def hear(self) -> dict[str, Any]:
        while b"\n" not in self._heard:
            self._heard += await self._sock.recv(65536)
        line, _, self._heard = self._heard.partition(b"\n")
        return dict(json.loads(line))

    async def hear_fd(self) -> int:
        data, ancillary, _, _ = await self._sock.recvmsg(65536, socket.CMSG_SPACE(4))
        self._heard += data
        return array.array("i", ancillary[0][2])[0]

    async def answer(self, **returned: Any) -> dict[str, Any]:
        asked = await self.hear()
        await self.say({"return": returned, "id": asked["id"]})
        return asked

    def hang_up(self) -> None:
        self._sock.close()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Monitor, FakeQemu]]:
    ours, theirs = trio.socket.socketpair()
    qemu = FakeQemu(theirs)
    async with trio.open_nursery() as nursery:
        await qemu.say(GREETING)
        nursery.start_soon(qemu.answer)
        monitor = await Monitor.over(nursery, trio.SocketStream(ours))
        try:
            yield monitor, qemu
        finally:
            monitor.close()
            qemu.hang_up()
            nursery.cancel_scope.cancel()


async def test_a_command_gets_its_own_answer_whatever_order_they_come_in() -> None:
    async with connected() as (monitor, qemu):
        answers: dict[str, Any] = {}

        async def ask(name: str) -> None:
            answers[name] = await monitor.execute(name)

        async with trio.open_nursery() as asking:
            asking.start_soon(ask, "first")
            asking.start_soon(ask, "second")
            asked = [await qemu.hear(), await qemu.hear()]
            for one in reversed(asked):
                await qemu.say({"return": one["execute"], "id": one["id"]})
        assert answers == {"first": "first", "second": "second"}


async def test_names_of_arguments_are_written_as_qemu_spells_them() -> None:
    async with connected() as (monitor, qemu), trio.open_nursery() as asking:
        asking.start_soon(lambda: monitor.execute("remove-fd", fdset_id=3))
        assert (await qemu.answer())["arguments"] == {"fdset-id": 3}


async def test_a_refusal_carries_qemus_words() -> None:
    async with connected() as (monitor, qemu), trio.open_nursery() as answering:

        async def refuse() -> None:
            await qemu.say({"error": {"class": "GenericError", "desc": "no such drive"}, "id": (await qemu.hear())["id"]})

        answering.start_soon(refuse)
        with pytest.raises(VmError, match="QEMU refused eject") as raised:
            await monitor.execute("eject")
        assert raised.value.code == "vm_refused"
        assert "no such drive" in raised.value.problem.cause


async def test_a_descriptor_goes_with_its_command() -> None:
    async with connected() as (monitor, qemu):
        reader, writer = os.pipe()
        async with trio.open_nursery() as asking:
            asking.start_soon(lambda: monitor.execute("add-fd", fd=writer))
            received = await qemu.hear_fd()
            await qemu.answer()
        assert os.fstat(received).st_ino == os.fstat(reader).st_ino
        for fd in (reader, writer, received):
            os.close(fd)


async def test_silence_ends_at_the_deadline(autojump_clock: trio.testing.MockClock) -> None:
    async with connected() as (monitor, _):
        with pytest.raises(VmError, match="did not answer stop"):
            await monitor.execute("stop", deadline=3)


async def test_the_answer_of_a_cancelled_command_is_dropped() -> None:
    async with connected() as (monitor, qemu):
        async with trio.open_nursery() as asking:
            asking.start_soon(monitor.execute, "slow")
            slow = await qemu.hear()
            asking.cancel_scope.cancel()
        async with trio.open_nursery() as asking:
            asking.start_soon(monitor.execute, "query-status")
            asked = await qemu.hear()
            await qemu.say({"return": "late", "id": slow["id"]}, {"return": {}, "id": asked["id"]})
        assert not monitor.closed.is_set()


async def test_events_reach_those_who_asked_for_them() -> None:
    async with connected() as (monitor, qemu):
        with monitor.events("MIGRATION") as events:
            await qemu.say({"event": "STOP"}, {"event": "MIGRATION", "data": {"status": "completed"}})
            assert (await events.receive())["data"] == {"status": "completed"}


async def test_a_flood_of_events_ends_the_subscription_and_not_the_daemon() -> None:
    async with connected() as (monitor, qemu):
        with monitor.events("NOISE") as events:
            await qemu.say(*[{"event": "NOISE"}] * (MAX_EVENTS + 10))
            await trio.testing.wait_all_tasks_blocked()
            assert len([event async for event in events]) == MAX_EVENTS


@pytest.mark.parametrize(
    "garbage",
    [b"hello\n", b"[1]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"x" * (MAX_LINE + 70_000)],
    ids=["text", "array", "no UTF-8", "deep", "endless"],
)
async def test_garbage_ends_the_link_and_every_wait_in_it(garbage: bytes) -> None:
    async with connected() as (monitor, qemu), trio.open_nursery() as talking:

        async def talk() -> None:
            with suppress(trio.BrokenResourceError):
                await qemu.say_bytes(garbage)

        talking.start_soon(talk)
        with pytest.raises(VmError):
            await monitor.execute("query-status")
        assert monitor.cause
        with pytest.raises(VmError, match="cannot be asked"):
            await monitor.execute("query-status")


async def test_a_qemu_that_goes_away_is_told_at_once() -> None:
    async with connected() as (monitor, qemu):
        with monitor.events("SHUTDOWN") as events:
            qemu.hang_up()
            assert [event async for event in events] == []
        with pytest.raises(VmError):
            await monitor.execute("query-status")


async def test_a_monitor_that_never_greets_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.socket.socketpair()
    async with trio.open_nursery() as nursery:
        with pytest.raises(VmError, match="does not speak"):
            await Monitor.over(nursery, trio.SocketStream(ours), deadline=5)
    theirs.close()
