"""A command in a box whose streams go both ways: boxd's frames over the node's WebSocket, which passes them on as they are.

Leaving hangs the command up. The guest is hostile: what it sends is bounded in size and checked in shape.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio
from trio_websocket import ConnectionClosed, ConnectionRejected, HandshakeError, WebSocketConnection, wrap_client_stream

from image.boxd.protocol import FRAME_HEADER, FRAME_MAX, Frame
from node.cli.failure import Failure, NotRunning, from_problem
from node.protocol import AttachBox

HANDSHAKE = 30.0  # seconds
GOODBYE = 1.0
CHUNK = FRAME_MAX  # bytes of input read at once
KEPT = 4096
SIGNALLED = 128  # a shell's exit code of a command that signal N ended is 128 + N

Sink = Callable[[bytes], Awaitable[None]]


class FrameReader:
    """Frames out of a stream of bytes that is cut anywhere."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[Frame, bytes]]:
        """The frames that `data` completes. Raises Failure when it is no stream of frames."""
        self._pending += data
        frames = []
        while len(self._pending) >= FRAME_HEADER.size:
            kind, length = FRAME_HEADER.unpack_from(self._pending)
            if kind not in (Frame.STDOUT, Frame.STDERR, Frame.EXIT) or length > FRAME_MAX:
                raise Failure("the box sent something that is not a frame", cause=f"kind {kind}, {length} bytes")
            end = FRAME_HEADER.size + length
            if len(self._pending) < end:
                break
            frames.append((Frame(kind), bytes(self._pending[FRAME_HEADER.size : end])))
            del self._pending[:end]
        return frames


class Attached:
    """The client's end of an attached command."""

    def __init__(self, connection: WebSocketConnection) -> None:
        self._connection = connection

    async def send(self, kind: Frame, payload: bytes = b"") -> None:
        """An empty STDIN is the end of input. A command that is gone takes no more: nothing happens."""
        with suppress(ConnectionClosed):
            await self._connection.send_message(FRAME_HEADER.pack(kind, len(payload)) + payload)

    async def run(self, stdout: Sink, stderr: Sink) -> int:
        """Hands output to the sinks until the command ended; its exit code."""
        reader = FrameReader()
        sinks = {Frame.STDOUT: stdout, Frame.STDERR: stderr}
        while True:
            try:
                message = await self._connection.get_message()
            except ConnectionClosed as error:
                raise Failure("the link to the box broke before the command ended", remedy="See how it is: `boxctl box list`.") from error
            if isinstance(message, str):
                raise from_problem(_object(message).get("error") or {})
            for kind, payload in reader.feed(message):
                if kind is Frame.EXIT:
                    return exit_code(payload)
                await sinks[kind](payload)


@asynccontextmanager
async def attach(socket: Path, box: str, spec: AttachBox) -> AsyncIterator[Attached]:
    """Runs `spec` in the box, which wakes. Errors come out of `Attached.run`."""
    try:
        stream = await trio.open_unix_socket(str(socket))
    except OSError as error:
        raise NotRunning("the node is not running", cause=str(error), remedy="Start it: `boxctl up`.") from error
    async with stream, trio.open_nursery() as nursery:
        try:
            with trio.fail_after(HANDSHAKE):
                connection = await wrap_client_stream(nursery, stream, "local", f"/v1/boxes/{box}/attach")
        except ConnectionRejected as error:
            raise Failure(f"the node refused to attach: HTTP {error.status_code}") from error
        except (HandshakeError, trio.TooSlowError) as error:
            raise Failure("the node did not answer a request to attach", remedy="Ask it how it is: `boxctl status`.") from error
        try:
            with suppress(ConnectionClosed):
                await connection.send_message(spec.model_dump_json(by_alias=True))
            yield Attached(connection)
        finally:
            with trio.move_on_after(GOODBYE, shield=True):
                await connection.aclose()
            nursery.cancel_scope.cancel()


def exit_code(payload: bytes) -> int:
    """The EXIT frame as a shell tells it."""
    end = _object(payload)
    if name := end.get("signal"):
        return SIGNALLED + _signal_number(str(name))
    code = end.get("exitCode")
    return code & 0xFF if isinstance(code, int) else 1


class Kept:
    """A sink that keeps the end of what a command said."""

    def __init__(self) -> None:
        self._data = b""

    async def take(self, data: bytes) -> None:
        self._data = (self._data + data)[-KEPT:]

    def text(self) -> str:
        return self._data.decode(errors="replace").strip()


async def read_some(descriptor: int) -> bytes:
    """What there is to read, b"" at the end. The descriptor stays blocking: it is shared with the shell that started us."""
    try:
        await trio.lowlevel.wait_readable(descriptor)
    except OSError as error:  # epoll takes no regular files; those are always readable
        if error.errno != errno.EPERM:
            raise
        await trio.lowlevel.checkpoint()
    try:
        return os.read(descriptor, CHUNK)
    except OSError as error:
        if error.errno == errno.EIO:  # our terminal is gone
            return b""
        raise


def writer(descriptor: int) -> Sink:
    """A sink that writes everything to the descriptor, in a thread: it may be a pipe that nobody reads for a while."""

    def write_all(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    async def sink(data: bytes) -> None:
        await trio.to_thread.run_sync(write_all, data, abandon_on_cancel=True)

    return sink


def _signal_number(name: str) -> int:
    try:
        return signal.Signals[name]
    except KeyError:
        return 0


def _object(data: str | bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Failure("the box sent something that is not a JSON object")
    return value
