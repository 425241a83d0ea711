"""A command whose streams go both ways over one upgraded connection, in frames (protocol.Frame).

Backpressure holds everywhere: output is read only as fast as the client takes it; input is queued up to QUEUE frames, then the
client's connection is left unread. A client that goes away takes the command along: SIGHUP as from a terminal, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import pty
import signal
import struct
import termios
from collections.abc import Callable, Mapping

from .commands import check_startable
from .http1 import Upgrade
from .output import CHUNK, QUIET
from .processes import Account, Process, Processes, end_session, environment, signal_name, signal_session
from .protocol import FRAME_HEADER, FRAME_MAX, AttachSpec, Frame

QUEUE = 16  # frames
END_OF_FILE = b"\x04"  # what a terminal's line discipline takes for the end of input


def attach(spec: AttachSpec, processes: Processes, display: Mapping[str, str]) -> Upgrade:
    """Raises Refused for a bad spec; the command starts once the connection has been handed over."""
    check_startable(spec.cmd, spec.cwd, spec.env)
    account = Account.named(spec.user)

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        extra = {"TERM": "xterm-256color"} if spec.tty else {}
        streams = _Terminal(spec, account) if spec.tty else _Pipes()
        try:
            env = environment(account, display, extra | spec.env)
            process = processes.shell(spec.cmd, account=account, env=env, cwd=spec.cwd, tty=spec.tty, **streams.child)
            streams.close_child()
            await _Session(process, streams, reader, writer).run()
        except OSError as error:
            writer.write(_frame(Frame.STDERR, f"boxd: {error}\n".encode()) + _frame(Frame.EXIT, b'{"exitCode":null,"signal":null}'))
        finally:
            streams.close()

    return Upgrade("boxd-attach", run)


class _Streams:
    """boxd's ends of a command's streams, and the child's, as descriptors."""

    child: dict[str, int]
    input: int
    outputs: dict[Frame, int]

    def close_child(self) -> None:
        for fd in set(self.child.values()):
            os.close(fd)
        self.child = {}

    def end_input(self) -> bytes:
        """What is still to be written so that the command sees the end of its input."""
        raise NotImplementedError

    def resize(self, cols: int, rows: int) -> None:
        """A pipe has no size."""

    def close(self) -> None:
        self.close_child()
        for fd in {self.input, *self.outputs.values()} - {-1}:
            os.close(fd)
        self.input, self.outputs = -1, {}


class _Terminal(_Streams):
    def __init__(self, spec: AttachSpec, account: Account) -> None:
        self.input, child = pty.openpty()
        self.outputs = {Frame.STDOUT: self.input}
        self.child = {"stdin": child, "stdout": child, "stderr": child}
        self.resize(spec.cols, spec.rows)
        os.fchown(child, account.uid, -1)
        os.set_blocking(self.input, False)

    def end_input(self) -> bytes:
        return END_OF_FILE

    def resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self.input, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


class _Pipes(_Streams):
    def __init__(self) -> None:
        stdin, self.input = os.pipe()
        out, stdout = os.pipe()
        err, stderr = os.pipe()
        self.outputs = {Frame.STDOUT: out, Frame.STDERR: err}
        self.child = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        for fd in (self.input, out, err):
            os.set_blocking(fd, False)

    def end_input(self) -> bytes:
        os.close(self.input)
        self.input = -1
        return b""


class _Session:
    def __init__(self, process: Process, streams: _Streams, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._streams, self._reader, self._writer = process, streams, reader, writer
        self._stdin: asyncio.Queue[bytes] = asyncio.Queue(QUEUE)
        self._moved = asyncio.get_running_loop().time()

    async def run(self) -> None:
        incoming = asyncio.ensure_future(self._receive())
        feeding = asyncio.ensure_future(self._feed())
        outgoing = asyncio.gather(*(self._forward(kind, fd) for kind, fd in self._streams.outputs.items()))
        finished = asyncio.ensure_future(self._finish(outgoing))
        try:
            await asyncio.wait({incoming, finished}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (incoming, feeding, outgoing, finished):
                task.cancel()
            await asyncio.gather(incoming, feeding, outgoing, finished, return_exceptions=True)
            if not self._process.exited.done():
                signal_session(self._process.pid, signal.SIGHUP)
                await end_session(self._process.pid, 2.0)

    async def _finish(self, outgoing: asyncio.Future[list[None]]) -> None:
        """The command's end, then the rest of its output: to the end of file, or QUIET seconds without any (report 3)."""
        end = await self._process.wait()
        while not outgoing.done():
            before = self._moved
            await asyncio.wait({outgoing}, timeout=QUIET)
            if self._moved == before:
                break
        told = {"exitCode": end.code, "signal": signal_name(end.signal)}
        self._writer.write(_frame(Frame.EXIT, json.dumps(told).encode()))
        await self._writer.drain()

    async def _forward(self, kind: Frame, fd: int) -> None:
        while data := await _read(fd):
            self._writer.write(_frame(kind, data))
            self._moved = asyncio.get_running_loop().time()
            await self._writer.drain()
            self._moved = asyncio.get_running_loop().time()

    async def _receive(self) -> None:
        """Ends with the connection, and with a frame that makes no sense."""
        with contextlib.suppress(OSError, EOFError, ValueError, struct.error):
            while True:
                kind, length = FRAME_HEADER.unpack(await self._reader.readexactly(FRAME_HEADER.size))
                if length > FRAME_MAX:
                    return
                await self._take(Frame(kind), await self._reader.readexactly(length))

    async def _take(self, kind: Frame, data: bytes) -> None:
        if kind is Frame.STDIN:
            await self._stdin.put(data)
        elif kind is Frame.RESIZE:
            self._streams.resize(*struct.unpack("!HH", data))
        elif kind is Frame.SIGNAL:
            number = signal.Signals(*struct.unpack("!B", data))
            if not self._process.exited.done():
                signal_session(self._process.pid, number)
        else:
            raise ValueError(kind)

    async def _feed(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the command takes no more input; its output goes on
            while data := await self._stdin.get():
                await _write(self._streams.input, data)
            await _write(self._streams.input, self._streams.end_input())
        while True:  # input behind its end goes nowhere, and holds up nothing
            await self._stdin.get()


def _frame(kind: Frame, data: bytes) -> bytes:
    return FRAME_HEADER.pack(kind, len(data)) + data


async def _read(fd: int) -> bytes:
    """Some bytes; none at the end. A terminal whose last process has closed it says so by EIO."""
    while True:
        try:
            return os.read(fd, min(CHUNK, FRAME_MAX))
        except BlockingIOError:
            await _until(fd, asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)
        except OSError as error:
            if error.errno == errno.EIO:
                return b""
            raise


async def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            await _until(fd, asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)


async def _until(fd: int, add: Callable[..., object], remove: Callable[[int], object]) -> None:
    possible: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(fd, _settle, possible)
    try:
        await possible
    finally:
        remove(fd)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
