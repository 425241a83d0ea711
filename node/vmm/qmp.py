"""A client of QEMU's monitor (QMP): JSON lines over a unix socket, with descriptors beside them.

    async with trio.open_nursery() as nursery:
        monitor = await Monitor.connect(nursery, path)      greeting read, capabilities negotiated
        await monitor.execute("query-status")               -> {"status": "running", ...}
        with monitor.events("MIGRATION") as events: ...     a bounded stream of the events of that name

One task of the nursery reads; commands may run side by side, each has an id and a deadline. A cancelled command's reply is dropped when it
comes. Once the link is lost every wait ends in VmError; the reading task itself never raises, so a broken QEMU breaks only its own box.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from node.errors import VmError

DEADLINE = 10.0  # seconds for one command
MAX_LINE = 1 << 20  # bytes; the longest answers (CPU definitions) take about 100 KiB
MAX_EVENTS = 64  # waiting in one subscription; one more ends it: a reader that slow has lost the thread
READ = 64 * 1024

Reply = dict[str, Any]


@dataclass
class _Pending:
    done: trio.Event = field(default_factory=trio.Event)
    reply: Reply | None = None


class Monitor:
    """The link to one QEMU. `closed` is set when it is lost, `cause` then says why."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.closed = trio.Event()
        self.cause = ""
        self._stream = stream
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._subscribers: dict[trio.MemorySendChannel[Reply], tuple[str, ...]] = {}
        self._greeting = trio.Event()
        self._sending = trio.Lock()

    @classmethod
    async def connect(cls, nursery: trio.Nursery, path: Path, deadline: float = DEADLINE) -> Monitor:
        """Connects to the socket at `path`, which may be longer than a socket's address can hold."""
        with through_folder(path) as address:
            sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                await sock.connect(address)
            except BaseException as error:
                sock.close()
                if isinstance(error, OSError):
                    raise VmError("QEMU's monitor does not answer", cause=f"{path.name}: {error}") from error
                raise
        return await cls.over(nursery, trio.SocketStream(sock), deadline)

    @classmethod
    async def over(cls, nursery: trio.Nursery, stream: trio.SocketStream, deadline: float = DEADLINE) -> Monitor:
        """A monitor over a connected stream, which it then owns: ready for commands, or VmError after `deadline` seconds."""
        monitor = cls(stream)
        nursery.start_soon(monitor._read)
        with trio.move_on_after(deadline):
            await monitor._greeting.wait()
            if not monitor.closed.is_set():
                await monitor.execute("qmp_capabilities", deadline=deadline)
                return monitor
        cause = monitor.cause or f"no greeting within {deadline:g} s"
        monitor.close()
        raise VmError("QEMU's monitor does not speak", cause=cause)

    async def execute(self, command: str, *, fd: int | None = None, deadline: float = DEADLINE, **arguments: Any) -> Any:
        """The command's return value. `_` in names of arguments becomes `-`; `fd` is passed beside the command.

        VmError with code `vm_refused` when QEMU answers with an error (its class and text are the cause), else `vm_failed`.
        """
        if self.closed.is_set():
            raise VmError(f"QEMU cannot be asked {command}", cause=self.cause)
        number, pending = next(self._numbers), _Pending()
        request: Reply = {"execute": command, "id": number}
        if arguments:
            request["arguments"] = {name.replace("_", "-"): value for name, value in arguments.items()}
        self._pending[number] = pending
        try:
            with trio.move_on_after(deadline):
                await self._send(json.dumps(request).encode() + b"\n", fd)
                await pending.done.wait()
        finally:
            del self._pending[number]
        if pending.reply is None:
            raise VmError(f"QEMU did not answer {command}", cause=self.cause or f"silent for {deadline:g} s")
        if (error := pending.reply.get("error")) is not None:
            cause = f"{error.get('class')}: {error.get('desc')}" if isinstance(error, dict) else repr(error)
            raise VmError(f"QEMU refused {command}", cause=cause[:1000], code="vm_refused")
        return pending.reply.get("return")

    @contextmanager
    def events(self, *names: str) -> Iterator[trio.MemoryReceiveChannel[Reply]]:
        """The events of these names from now on; the channel ends when the link is lost or MAX_EVENTS wait unread."""
        send, receive = trio.open_memory_channel[Reply](MAX_EVENTS)
        self._subscribers[send] = names
        if self.closed.is_set():
            send.close()
        try:
            yield receive
        finally:
            self._subscribers.pop(send, None)
            send.close()
            receive.close()

    def close(self) -> None:
        """Ends the link; QEMU goes on and accepts the next client."""
        self._lose("closed here")
        self._stream.socket.close()

    async def _send(self, line: bytes, fd: int | None) -> None:
        # Not cut short by a cancel: half a line would spoil the next one. It fits the socket's buffer unless QEMU has stopped reading.
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, "little"))] if fd is not None else []
        async with self._sending:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + DEADLINE) as scope:
                try:
                    sent = await self._stream.socket.sendmsg([line], ancillary)
                    if sent < len(line):
                        await self._stream.send_all(line[sent:])
                except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    self._lose(str(error) or type(error).__name__)
            if scope.cancelled_caught:
                self._lose("QEMU does not read")

    async def _read(self) -> None:
        """Until the link ends; cancelled (the daemon stops) it ends the link and leaves QEMU alone."""
        buffer, cause = bytearray(), "QEMU closed its monitor"
        try:
            while chunk := await self._stream.receive_some(READ):
                buffer += chunk
                *lines, rest = bytes(buffer).split(b"\n")
                buffer = bytearray(rest)
                if len(buffer) > MAX_LINE:
                    cause = f"a line of more than {MAX_LINE} bytes"
                    break
                for line in lines:
                    self._take(json.loads(line))
        except (ValueError, RecursionError) as error:
            cause = f"not QMP: {error}"[:300]
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            cause = str(error) or type(error).__name__
        finally:
            self._lose(cause)
            self._stream.socket.close()

    def _take(self, message: Any) -> None:
        if not isinstance(message, dict):
            raise ValueError(f"{type(message).__name__} where an object belongs")  # noqa: TRY004 (one kind of bad input)
        if "QMP" in message:
            self._greeting.set()
        elif "event" in message:
            for send in [send for send, names in self._subscribers.items() if message["event"] in names]:
                try:
                    send.send_nowait(message)
                except trio.WouldBlock:
                    del self._subscribers[send]
                    send.close()
        elif isinstance(number := message.get("id"), int) and (pending := self._pending.get(number)):
            pending.reply = message
            pending.done.set()

    def _lose(self, cause: str) -> None:
        if self.closed.is_set():
            return
        self.cause = cause
        self.closed.set()
        self._greeting.set()
        for pending in self._pending.values():
            pending.done.set()
        for send in self._subscribers:
            send.close()


@contextmanager
def through_folder(path: Path) -> Iterator[str]:
    """An address for `path` that fits into the 107 bytes of a unix socket's, however deep the folder lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """A listening socket at `path` (in a folder that only the daemon may enter); a stale one is replaced. Clients may connect at once."""
    path.unlink(missing_ok=True)
    with through_folder(path) as address:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(address)
            sock.listen(1)
        except BaseException:
            sock.close()
            raise
    return sock

