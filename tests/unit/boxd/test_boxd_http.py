"""boxd as a server: what is no request, too large or too much is refused, and the next client is served all the same."""

from __future__ import annotations

import json

import pytest
import trio

from image.boxd.http1 import CONNECTIONS, HEAD_LIMIT, Refused, parse_head
from image.boxd.protocol import MAX_BODY, CommandSpec
from image.boxd.wire import from_wire

from .conftest import TOKEN, HostBoxd, eventually

AUTH = f"Authorization: Bearer {TOKEN}\r\n".encode()
WITHIN = 20.0


async def say(boxd: HostBoxd, request: bytes) -> bytes:
    """All that boxd answers until it closes, or has answered once."""
    async with await trio.open_tcp_stream("127.0.0.1", boxd.port) as stream:
        with trio.fail_after(WITHIN):
            await stream.send_all(request)
            return bytes(await stream.receive_some(65536))


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.0\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nX: " + b"x" * HEAD_LIMIT + b"\r\n\r\n", 431),
        (b"POST /v1/commands HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST /v1/commands HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 411),
        (b"POST /v1/commands HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY + 1), 413),
        (b"GET /v1/health HTTP/1.1\r\n\r\n", 401),
        (b"GET /v1/health HTTP/1.1\r\n" + AUTH + b"\r\n", 200),
        (b"GET /v1/nothing HTTP/1.1\r\n" + AUTH + b"\r\n", 404),
        (b"DELETE /v1/commands HTTP/1.1\r\n" + AUTH + b"\r\n", 405),
        (b"GET /v1/commands/../../etc HTTP/1.1\r\n" + AUTH + b"\r\n", 404),
        (b"POST /v1/attach HTTP/1.1\r\n" + AUTH + b"\r\n", 426),
        (b"POST /v1/commands HTTP/1.1\r\nContent-Length: 2\r\n" + AUTH + b"\r\n[]", 400),
        (b"POST /v1/commands?waitSec=nan HTTP/1.1\r\nContent-Length: 2\r\n" + AUTH + b"\r\n{}", 400),
    ],
)
async def test_every_request_has_its_status(boxd: HostBoxd, request_bytes: bytes, status: int) -> None:
    assert (await say(boxd, request_bytes)).startswith(b"HTTP/1.1 %d " % status)


async def test_connections_are_counted_and_the_ones_too_many_are_told(boxd: HostBoxd) -> None:
    streams = [await trio.open_tcp_stream("127.0.0.1", boxd.port) for _ in range(CONNECTIONS)]
    assert b"too_many_connections" in await say(boxd, b"")
    for stream in streams:
        await stream.aclose()

    async def served() -> bool:
        return b" 200 " in await say(boxd, b"GET /v1/health HTTP/1.1\r\n" + AUTH + b"\r\n")

    await eventually(served)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"cmd": "true"}, "execId"),
        ({"execId": "a", "cmd": 1}, "cmd"),
        ({"execId": "a", "cmd": "true", "env": {"A": 1}}, "env"),
        ({"execId": "a", "cmd": "true", "timeoutSec": True}, "timeoutSec"),
        ({"execId": "a", "cmd": "true", "shell": "zsh"}, "shell"),
    ],
)
def test_a_field_that_is_wrong_is_named(body: dict[str, object], named: str) -> None:
    with pytest.raises(Refused, match=named):
        from_wire(CommandSpec, json.dumps(body).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"timeoutSec": NaN}', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="JSON"):
        from_wire(CommandSpec, body)


def test_a_head_is_read_as_it_stands() -> None:
    assert parse_head(b"GET /a?b=c HTTP/1.1\r\nA: 1\r\nb:2 \r\n\r\n") == ("GET", "/a?b=c", {"a": "1", "b": "2"})
