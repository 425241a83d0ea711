"""The node's client of boxd against a boxd that is hostile: typed errors, within bounds, whatever comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from image.boxd.protocol import Restore
from node.boxd_http import ANSWER_LIMIT
from node.errors import BadRequest, GuestError, GuestTimeout
from node.guest import Guest
from node.protocol import AttachBox, RunCommand

HEALTH = {
    "ready": True, "version": "1", "generation": 1, "uptime": 1.0, "realtime": 1.0, "desktop": "up", "docker": "absent", "load": 0.0,
    "memoryTotal": 1, "memoryAvailable": 1, "workTotal": 1, "workFree": 1,
}  # fmt: skip
COMMAND = {
    "execId": "a", "cmd": "true", "cwd": "/", "user": "root", "background": False, "pid": 1, "running": False, "startedAt": 1.0,
    "endedAt": 1.0, "exitCode": 0, "signal": None, "timedOut": False, "endReason": "exited", "cpuSeconds": 0.0,
    "stdout": None, "stderr": None,
}  # fmt: skip
Serve = Callable[[trio.SocketStream], Awaitable[None]]


def answer(body: Any, status: int = 200, headers: str = "") -> bytes:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(encoded)}\r\n{headers}\r\n".encode() + encoded


def from_offset(start: int) -> str:
    return f"Boxd-Offset: {start}\r\nBoxd-Running: 0\r\n"


@asynccontextmanager
async def guest_of(*serves: Serve) -> AsyncIterator[Guest]:
    """A Guest whose n-th connection is served by the n-th function (the last one serves all that follow)."""
    left = list(serves)
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]

    async def serve(stream: trio.SocketStream) -> None:
        try:
            await (left.pop(0) if len(left) > 1 else left[0])(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has had enough
        finally:
            await stream.aclose()

    async def connect(_port: int) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", port)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, serve, [listener]))
        guest = Guest(connect, token="t" * 16)
        try:
            yield guest
        finally:
            guest.abort()
            nursery.cancel_scope.cancel()


def saying(*answers: bytes) -> Serve:
    """Answers one request after another, then closes."""

    async def serve(stream: trio.SocketStream) -> None:
        for each in answers:
            await stream.receive_some(65536)
            await stream.send_all(each)

    return serve


async def silent(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def closing(stream: trio.SocketStream) -> None:
    await stream.receive_some(65536)


async def endless(stream: trio.SocketStream) -> None:
    await stream.receive_some(65536)
    await stream.send_all(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await stream.send_all(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


async def dripping(stream: trio.SocketStream) -> None:
    await stream.receive_some(65536)
    await stream.send_all(b"HTTP/1.1 200 X\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        await trio.sleep(1)
        await stream.send_all(b" ")


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\xff\x00 garbage\r\n\r\n",
        b"HTTP/1.1 200 X\r\n" + b"A: b\r\n" * 10_000,
        b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\n{}",
        b"HTTP/1.1 200 X\r\nContent-Length: x\r\n\r\n{}",
        b"HTTP/1.1 101 X\r\nUpgrade: boxd-attach\r\n\r\n",
        b"HTTP/1.1 100 X\r\n\r\n",
        answer(b"not json"),
        answer(b"[1]"),
        answer(b"[" * 200_000),
        answer(b'{"load": NaN}'),
        answer({}),
        answer(HEALTH | {"ready": "perhaps"}),
        answer(HEALTH | {"memoryTotal": "much"}),
        answer("moved", status=302),
        answer(b"oops", status=500),
    ],
)
async def test_an_answer_that_makes_no_sense_is_a_guest_error(said: bytes) -> None:
    async with guest_of(saying(said)) as guest:
        with pytest.raises(GuestError) as caught:
            await guest.status()
        assert caught.value.problem.hop == "guest"
        assert len(caught.value.problem.message + caught.value.problem.cause) < 1000


async def test_an_endless_answer_is_cut_at_its_limit() -> None:
    async with guest_of(endless) as guest:
        with pytest.raises(GuestError, match=str(ANSWER_LIMIT)):
            await guest.status()


@pytest.mark.parametrize("serve", [silent, dripping])
async def test_a_slow_answer_ends_at_its_deadline(serve: Serve, autojump_clock: MockClock) -> None:
    async with guest_of(serve) as guest:
        started = trio.current_time()
        with pytest.raises(GuestTimeout):
            await guest.run(RunCommand(exec_id="a", cmd="true"), wait=30)
        assert trio.current_time() - started == pytest.approx(45)


async def test_a_guest_that_cannot_be_reached_is_told_as_one() -> None:
    async def refuse(_port: int) -> trio.SocketStream:
        raise ConnectionRefusedError(111, "refused")

    with pytest.raises(GuestError, match="cannot be reached"):
        await Guest(refuse, token="t").status()


async def test_boxd_s_own_error_comes_through_with_code_and_words_cut_to_size() -> None:
    told = {"error": {"code": "cwd_not_found", "message": "m" * 10_000, "cause": "c", "remedy": "r"}}
    async with guest_of(saying(answer(told, 400))) as guest:
        with pytest.raises(GuestError) as caught:
            await guest.status()
    problem = caught.value.problem
    assert (problem.code, len(problem.message), problem.cause, problem.remedy, caught.value.status) == ("cwd_not_found", 500, "c", "r", 400)


async def test_a_reused_connection_that_died_is_replaced_once() -> None:
    async with guest_of(saying(answer(HEALTH)), saying(answer(HEALTH))) as guest:
        await guest.status()
        await guest.status()


async def test_a_fresh_connection_that_dies_is_not_tried_again() -> None:
    async with guest_of(saying(answer(HEALTH)), closing, saying(answer(HEALTH))) as guest:
        await guest.status()
        with pytest.raises(GuestError, match="closed the connection"):
            await guest.status()
        await guest.status()


async def test_a_connection_is_used_again_also_after_a_refusal() -> None:
    async with guest_of(saying(answer({"error": {"code": "x", "message": "no"}}, 404), answer(HEALTH)), closing) as guest:
        with pytest.raises(GuestError, match="no"):
            await guest.status()
        await guest.status()


async def test_an_abort_wakes_whoever_waits_and_ends_the_pool() -> None:
    # report 19
    async with guest_of(silent) as guest, trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(GuestError):
                await guest.run(RunCommand(exec_id="a", cmd="true"), wait=3600)

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked(0.05)
        guest.abort()
        with trio.fail_after(5), pytest.raises(GuestError, match="being stopped"):
            await guest.status()


async def test_an_answer_for_another_command_is_refused() -> None:
    async with guest_of(saying(answer(COMMAND))) as guest:
        with pytest.raises(GuestError, match="another command"):
            await guest.command("b")


async def test_a_restore_of_another_generation_is_refused() -> None:
    async with guest_of(saying(answer({"generation": 1, "realtime": 1.0, "ready": True}))) as guest:
        with pytest.raises(GuestError, match="generation 1, not 2"):
            await guest.restore(Restore(2, "token", "", 1.0))


@pytest.mark.parametrize("headers", ["", "Boxd-Offset: 5\r\n", from_offset(-1), from_offset(3)])
async def test_output_from_another_place_than_asked_for_is_refused(headers: str) -> None:
    async with guest_of(saying(answer(b"x", headers=headers))) as guest:
        with pytest.raises(GuestError):
            async with aclosing(guest.output("a", "stdout", offset=5)) as chunks:
                await anext(chunks)


async def test_output_that_was_not_kept_is_said_in_its_place() -> None:
    parts = [answer(data, headers=from_offset(start)) for start, data in ((0, b"head"), (100, b"tail"), (104, b""))]
    async with guest_of(saying(*parts)) as guest, aclosing(guest.output("a", "stdout")) as chunks:
        assert b"".join([chunk async for chunk in chunks]) == b"head\n[96 bytes were not kept]\ntail"


async def test_a_stream_that_stalls_ends_at_its_deadline(autojump_clock: MockClock) -> None:
    async def stall(stream: trio.SocketStream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(b"HTTP/1.1 200 X\r\nBoxd-Offset: 0\r\nBoxd-Running: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        await trio.sleep_forever()

    async with guest_of(stall) as guest, aclosing(guest.output("a", "stdout", follow=True)) as chunks:
        assert await anext(chunks) == b"x"
        with pytest.raises(GuestTimeout):
            await anext(chunks)


async def test_frames_that_come_with_the_upgrade_are_not_lost() -> None:
    upgraded = b"HTTP/1.1 101 X\r\nUpgrade: boxd-attach\r\nConnection: upgrade\r\n\r\nearly"
    async with guest_of(saying(upgraded)) as guest, guest.attach(AttachBox(cmd="true")) as attached:
        assert await attached.receive() == b"early"
        assert await attached.receive() == b""


async def test_an_exec_id_or_stream_that_is_none_never_reaches_the_guest() -> None:
    async with guest_of(closing) as guest:
        with pytest.raises(BadRequest):
            await guest.command("../health")
        with pytest.raises(BadRequest):
            async with aclosing(guest.output("a", "stdin")) as chunks:
                await anext(chunks)
