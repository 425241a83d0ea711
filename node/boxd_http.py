"""HTTP/1.1 to one guest: h11 over streams, a pool of connections, and a bound for everything that a hostile boxd may send.

Whatever is odd becomes a GuestError, whatever is late a GuestTimeout. Every request to boxd may be repeated, so one that dies on a
reused connection before the first byte of its answer is sent once more, on a fresh connection.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import h11
import trio

from node.errors import GuestError, GuestTimeout

ANSWER_LIMIT = 4 << 20  # bytes of a JSON answer
HEAD_LIMIT = 16 * 1024  # bytes of an answer's head, and of a chunk's
CONNECTIONS = 48  # at once; boxd serves 64
CHUNK = 64 * 1024
Head = h11.Response | h11.InformationalResponse
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: closing sends RST


class LostError(GuestError):
    """The connection ended before the answer did."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Like trio.fail_after, but raises GuestTimeout."""
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError as error:
        raise GuestTimeout(f"boxd did not answer within {seconds:g} s") from error


class Connection:
    """One stream and where its HTTP conversation stands."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.answered = False  # a byte of the present answer has come
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)

    async def send(self, request: h11.Request, body: bytes) -> None:
        self.answered = False
        events = (request, h11.Data(data=body), h11.EndOfMessage()) if body else (request, h11.EndOfMessage())
        try:
            await self.stream.send_all(b"".join(self._http.send(event) or b"" for event in events))
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LostError("the connection to boxd was lost", cause=str(error)) from error

    async def response(self) -> Head:
        """The head of the answer; an informational one is 101 always."""
        event = await self._next()
        if isinstance(event, h11.Response) or (isinstance(event, h11.InformationalResponse) and event.status_code == 101):
            return event
        raise GuestError("boxd sent no answer but something else of HTTP")

    async def body(self) -> bytes:
        """Some bytes of the answer's body; none at its end."""
        while True:
            event = await self._next()
            if isinstance(event, h11.EndOfMessage):
                return b""
            if isinstance(event, h11.Data) and event.data:
                return bytes(event.data)

    async def whole(self) -> bytes:
        parts, size = [], 0
        while data := await self.body():
            parts.append(data)
            if (size := size + len(data)) > ANSWER_LIMIT:
                raise GuestError(f"boxd's answer has more than {ANSWER_LIMIT} bytes")
        return b"".join(parts)

    def recycle(self) -> bool:
        """Ready for another request, if this answer was read to its end and the connection is to stay."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def trailing(self) -> bytes:
        """What came behind a 101."""
        return bytes(self._http.trailing_data[0])

    def reset(self) -> None:
        """Closes with RST: nothing lingers in the guest, and whoever waits on the stream wakes up."""
        if self.stream.socket.fileno() >= 0:
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.stream.socket.close()

    async def _next(self) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self.stream.receive_some(CHUNK)
                if not data and not self.answered:
                    raise LostError("boxd closed the connection without an answer")
                self.answered = True
                self._http.receive_data(bytes(data))
        except h11.RemoteProtocolError as error:
            raise GuestError("boxd's answer is not HTTP, or cut short", cause=str(error)) from error
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LostError("the connection to boxd was lost", cause=str(error)) from error
        return event


class Pool:
    """The connections to one guest in one generation (report 19): none outlives `abort`."""

    def __init__(self, connect: Callable[[], Awaitable[trio.SocketStream]]) -> None:
        self._connect = connect
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._slots = trio.Semaphore(CONNECTIONS)
        self._aborted = False

    async def ask(self, request: h11.Request, body: bytes, timeout: float) -> dict[str, Any]:
        """One request, one JSON object."""
        with within(timeout):
            async with self.exchange(request, body, timeout) as (connection, _):
                return json_object(await connection.whole())

    @asynccontextmanager
    async def exchange(self, request: h11.Request, body: bytes, timeout: float) -> AsyncIterator[tuple[Connection, Head]]:
        """A 2xx answer that begins within `timeout` seconds; another status raises what boxd told. Bounds on its body are the caller's."""
        async with self._slots:
            with within(timeout):
                connection, response = await self._begin(request, body)
            try:
                if not 200 <= response.status_code < 300:
                    with within(timeout):
                        raise refusal(response.status_code, await connection.whole())
                yield connection, response
            finally:
                self._give_back(connection)

    async def upgrade(self, request: h11.Request, body: bytes) -> Connection:
        """A fresh connection that has left HTTP behind (101); end it with `discard`."""
        connection, response = await self._send(await self._fresh(), request, body)
        if isinstance(response, h11.InformationalResponse):
            return connection
        try:
            raise refusal(response.status_code, await connection.whole())
        finally:
            self.discard(connection)

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.reset()

    def abort(self) -> None:
        """Resets all connections; whoever waits on one gets a GuestError. Nothing can be asked any more."""
        self._aborted = True
        self._idle.clear()
        for connection in list(self._open):
            self.discard(connection)

    async def _begin(self, request: h11.Request, body: bytes) -> tuple[Connection, Head]:
        if self._idle:
            connection = self._idle.pop()
            try:
                return await self._send(connection, request, body)
            except LostError:
                if connection.answered or self._aborted:
                    raise
            for stale in self._idle:  # as old, so likely as dead
                self.discard(stale)
            self._idle.clear()
        return await self._send(await self._fresh(), request, body)

    async def _send(self, connection: Connection, request: h11.Request, body: bytes) -> tuple[Connection, Head]:
        try:
            await connection.send(request, body)
            return connection, await connection.response()
        except BaseException:
            self.discard(connection)
            raise

    async def _fresh(self) -> Connection:
        if self._aborted:
            raise GuestError("the guest is being stopped")
        try:
            connection = Connection(await self._connect())
        except OSError as error:
            raise GuestError("boxd cannot be reached", cause=str(error)) from error
        self._open.add(connection)
        if self._aborted:  # meanwhile
            self.discard(connection)
            raise GuestError("the guest is being stopped")
        return connection

    def _give_back(self, connection: Connection) -> None:
        """Kept when its answer was read to the end (also that of a refusal), else closed."""
        if not self._aborted and connection.recycle():
            self._idle.append(connection)
        else:
            self.discard(connection)


def json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GuestError("boxd's answer is not JSON", cause=str(error)[:200]) from error
    if not isinstance(value, dict):
        raise GuestError("boxd's answer is no JSON object")
    return value


def refusal(status: int, body: bytes) -> GuestError:
    """The error that boxd told, with its own code and words, cut to a size that fits a message."""
    error = json_object(body).get("error")
    told = {name: str(value)[:500] for name, value in error.items()} if isinstance(error, dict) else {}
    failure = GuestError(
        told.get("message", f"boxd refused with status {status}"),
        cause=told.get("cause", ""),
        remedy=told.get("remedy") or None,
        code=told.get("code") or None,
    )
    failure.status = status if 400 <= status < 500 else GuestError.status
    return failure


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
