"""As much of HTTP/1.1 as one node needs: requests with bounded heads and bodies, keep-alive, JSON, chunked streams, Upgrade.

A connection serves one request at a time. While a request is worked on the connection is watched: a client that goes away
cancels the waiting, never the command that it waited for. Pipelining is not spoken; the node does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from .protocol import MAX_BODY

HEAD_LIMIT = 16 * 1024
CONNECTIONS = 64
READ_DEADLINE = 30.0  # seconds for a whole request
IDLE_DEADLINE = 600.0  # seconds that a connection may lie unused
WRITE_DEADLINE = 600.0  # seconds that a reader may leave a chunk unread


class Refused(Exception):
    """An answer with a 4xx or 5xx status and a Problem-like body."""

    def __init__(self, status: int, code: str, message: str, cause: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": code, "message": message, "cause": cause, "remedy": remedy}}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    arrived: float  # time.monotonic() when its head had been read


@dataclass(frozen=True)
class Json:
    value: Any
    status: int = 200


@dataclass(frozen=True)
class Stream:
    chunks: AsyncGenerator[bytes, None]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Upgrade:
    """Answers 101 and hands the connection to `run`; it is closed afterwards."""

    protocol: str
    run: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


Answer = Json | Stream | Upgrade
Route = Callable[[Request], Awaitable[Answer]]


class Server:
    """Listens until closed. `address` is (host, port) as bound."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._open = 0

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._converse, host, port, limit=HEAD_LIMIT)
        bound: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return bound

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > CONNECTIONS:
                refusal = Refused(503, "too_many_connections", f"More than {CONNECTIONS} connections are open.")
                await _send_json(writer, Json(refusal.body, refusal.status), keep=False)
                return
            while await self._serve_one(reader, writer):
                pass
        except (OSError, TimeoutError, EOFError):
            pass  # the client went away or kept us waiting; there is no one to tell
        finally:
            self._open -= 1
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """True when the connection may serve another request."""
        try:
            request = await read_request(reader)
        except Refused as refusal:
            await _send_json(writer, Json(refusal.body, refusal.status), keep=False)
            return False
        answer = await _unless_gone(self._answer(request), reader)
        if isinstance(answer, Json):
            await _send_json(writer, answer, keep=True)
            return True
        if isinstance(answer, Stream):
            return await _send_stream(writer, answer, reader)
        writer.write(f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: {answer.protocol}\r\nConnection: Upgrade\r\n\r\n".encode())
        await answer.run(reader, writer)
        return False

    async def _answer(self, request: Request) -> Answer:
        try:
            return await self._route(request)
        except Refused as refusal:
            return Json(refusal.body, refusal.status)
        except Exception as error:  # one request's fault must not take the daemon along
            traceback.print_exc(file=sys.stderr)
            return Json(Refused(500, "boxd_failed", "boxd met an error of its own.", repr(error)).body, 500)


async def read_request(reader: asyncio.StreamReader) -> Request:
    async with asyncio.timeout(IDLE_DEADLINE):
        first = await reader.readexactly(1)
    async with asyncio.timeout(READ_DEADLINE):
        try:
            head = first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as error:
            raise Refused(431, "head_too_large", f"A request's head may have {HEAD_LIMIT} bytes.") from error
        arrived = time.monotonic()
        method, target, headers = parse_head(head)
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
            raise Refused(411, "length_required", "A body needs a Content-Length.")
        if len(length) > 9 or int(length) > MAX_BODY:
            raise Refused(413, "body_too_large", f"A body may have {MAX_BODY} bytes.")
        body = await reader.readexactly(int(length))
    parts = urlsplit(target)
    return Request(method, unquote(parts.path), dict(parse_qsl(parts.query, keep_blank_values=True)), headers, body, arrived)


def parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """(method, target, headers) of a request's head; raises Refused."""
    lines = head.decode("latin-1").split("\r\n")
    try:
        method, target, version = lines[0].split(" ")
        pairs = [line.split(":", 1) for line in lines[1:] if line]
        headers = {name.lower(): value.strip() for name, value in pairs}
    except ValueError as error:
        raise Refused(400, "bad_request", "That is not HTTP.") from error
    if version != "HTTP/1.1" or not target.startswith("/") or len(headers) != len(pairs):
        raise Refused(400, "bad_request", "Only plain HTTP/1.1 is spoken here.")
    return method, target, headers


async def _unless_gone(work: Awaitable[Answer], reader: asyncio.StreamReader) -> Answer:
    """The work's answer; EOFError, and the work cancelled, when the client goes away (or talks out of turn) before."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            raise EOFError
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _send_json(writer: asyncio.StreamWriter, answer: Json, *, keep: bool) -> None:
    body = json.dumps(answer.value, separators=(",", ":")).encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body))} | ({} if keep else {"Connection": "close"})
    writer.write(_head(answer.status, fields) + body)
    async with asyncio.timeout(READ_DEADLINE):
        await writer.drain()


async def _send_stream(writer: asyncio.StreamWriter, answer: Stream, reader: asyncio.StreamReader) -> bool:
    fields = {"Content-Type": "application/octet-stream", "Transfer-Encoding": "chunked", **answer.headers}
    writer.write(_head(200, fields))

    async def pour() -> Answer:
        async for chunk in answer.chunks:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            async with asyncio.timeout(WRITE_DEADLINE):
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        return answer

    async with contextlib.aclosing(answer.chunks):
        await _unless_gone(pour(), reader)
    return True


def _head(status: int, fields: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
