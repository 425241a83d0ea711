"""The node's client of boxd (image/boxd/protocol.py), one for each generation of a box.

It is made after a start, thaw or boot, opened by `restore`, and ended by `abort` before the guest stops. The guest is hostile: every
answer is bounded in size and time (node/boxd_http.py) and held to its shape here. All methods raise GuestError and GuestTimeout;
an error that boxd tells itself keeps its code and its words.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar
from urllib.parse import urlencode

import h11
import trio
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel, to_snake

from image.boxd.protocol import EXEC_ID, PORT, AttachSpec, CommandSpec, Health, Restore, Restored
from node.boxd_http import CHUNK, Connection, Head, LostError, Pool, within
from node.errors import BadRequest, GuestError
from node.protocol import AttachBox, CommandView, CommandWait, GuestHealth, RunCommand, WaitCommand

Connect = Callable[[int], Awaitable[trio.SocketStream]]  # a guest's TCP port -> a stream to it; raises OSError or GuestError
Value = TypeVar("Value")
View = TypeVar("View", bound=BaseModel)

ANSWER = 15.0  # seconds for an answer, beyond what it was asked to wait for
SETTLE = 120.0  # seconds: a guest may have a GiB to write
RESTORE = 90.0  # seconds: an emulated guest on a crowded host has needed 30, and giving up costs more than waiting
PIECE = 60.0  # seconds between two pieces of a stream; boxd ends a quiet one after 20 s


class Guest:
    """Any number of tasks may call at once. A cancelled call stops waiting and closes its connection; what it asked for goes on."""

    def __init__(self, connect: Connect, *, token: str, generation: int = 0, port: int = PORT) -> None:
        self.generation = generation
        self._token = token
        self._pool = Pool(lambda: connect(port))

    async def status(self, *, timeout: float = 5.0) -> Health:
        """All that boxd says of itself; `ready` tells when a template may be frozen. Answered before the restore as well."""
        return _shaped(Health, await self._ask("GET", "/v1/health", timeout=timeout))

    async def health(self) -> GuestHealth:
        """The part of it that people see."""
        known = asdict(await self.status())
        view = {name: known[name] for name in GuestHealth.model_fields if name in known}
        return _view(GuestHealth, {"healthy": True, "checked_at": time.time(), **view})

    async def restore(self, wanted: Restore, *, timeout: float = RESTORE) -> Restored:
        """Opens the box; from then on this Guest is of `wanted.generation` and speaks with its token. May be repeated."""
        restored = _shaped(Restored, await self._ask("POST", "/v1/restore", asdict(wanted), timeout=timeout))
        if restored.generation != wanted.generation:
            raise GuestError(f"boxd restored generation {restored.generation}, not {wanted.generation}")
        self._token, self.generation = wanted.token, wanted.generation
        return restored

    async def run(self, request: RunCommand, *, wait: float = 0.0) -> CommandView:
        """Starts the command, or joins it when its execId is known; answers at its end or after `wait` seconds."""
        spec = CommandSpec(**request.model_dump(exclude={"wait_sec"}))
        return await self._command(request.exec_id, "POST", f"/v1/commands?waitSec={wait:.3f}", asdict(spec), wait=wait)

    async def command(self, exec_id: str, *, wait: float = 0.0) -> CommandView:
        """The command with the last bytes of its output, at its end or after `wait` seconds."""
        return await self._command(exec_id, "GET", f"{_path(exec_id)}?waitSec={wait:.3f}", wait=wait)

    async def commands(self) -> list[CommandView]:
        """All that boxd remembers, oldest first, without output."""
        listed = (await self._ask("GET", "/v1/commands")).get("commands")
        if not isinstance(listed, list):
            raise GuestError("boxd's list of commands is none")
        return [_view(CommandView, command) for command in listed]

    async def ready(self, exec_id: str, request: WaitCommand) -> CommandWait:
        """Waits for a port or a text in the output; `ready` is false when the command ended without, or `wait_sec` passed."""
        wanted = {"waitSec": f"{request.wait_sec:.3f}", "port": request.ready_port, "log": request.ready_log}
        query = urlencode({name: value for name, value in wanted.items() if value})
        return _view(CommandWait, await self._ask("GET", f"{_path(exec_id)}/ready?{query}", timeout=request.wait_sec + ANSWER))

    async def stop(self, exec_id: str, *, grace: float = 5.0) -> CommandView:
        """SIGTERM to the command's process group, SIGKILL after `grace` seconds; also what an ended command left behind in it."""
        return await self._command(exec_id, "POST", f"{_path(exec_id)}/stop", {"grace_sec": grace}, wait=grace)

    async def settle(self, *, drop_caches: bool = False) -> None:
        """The guest's dirty pages are on its disks; a template's page cache is dropped as well. Answered before the restore too."""
        await self._ask("POST", "/v1/settle", {"drop_caches": drop_caches}, timeout=SETTLE)

    async def output(self, exec_id: str, stream: str, *, offset: int = 0, follow: bool = False) -> AsyncGenerator[bytes, None]:
        """The kept bytes of `stdout` or `stderr` from `offset` on; with `follow` until the command has ended. A line of its own says
        how many bytes boxd did not keep (report 1). Close it (contextlib.aclosing) when leaving early."""
        if stream not in {"stdout", "stderr"}:
            raise BadRequest(f"a command has no stream {stream[:64]!r}", remedy="Ask for stdout or stderr.")
        more = True
        while more:
            request = self._request("GET", f"{_path(exec_id)}/output/{stream}?offset={offset}&follow={int(follow)}")
            async with self._pool.exchange(request, b"", ANSWER) as (connection, response):
                start, running = _number(response, b"boxd-offset"), _number(response, b"boxd-running")
                if start > offset:
                    yield f"\n[{start - offset} bytes were not kept]\n".encode()
                elif start < offset:
                    raise GuestError(f"boxd sent output from {start}, not {offset}")
                offset = start
                while data := await _piece(connection):
                    offset += len(data)
                    yield data
                more = offset > start or bool(follow and running)

    @asynccontextmanager
    async def attach(self, request: AttachBox) -> AsyncIterator[AttachedCommand]:
        """Starts the command with its streams bound to a connection of its own. Leaving the block hangs it up."""
        body = _json(asdict(AttachSpec(**request.model_dump())))
        with within(ANSWER):
            connection = await self._pool.upgrade(self._request("POST", "/v1/attach", body, upgrade="boxd-attach"), body)
        try:
            yield AttachedCommand(connection)
        finally:
            self._pool.discard(connection)

    def abort(self) -> None:
        """Resets every connection: whoever waits gets a GuestError. Call it before the guest stops, as it would never answer again."""
        self._pool.abort()

    async def _command(self, exec_id: str, method: str, target: str, body: dict[str, Any] | None = None, *, wait: float) -> CommandView:
        view = _view(CommandView, await self._ask(method, target, body, timeout=wait + ANSWER))
        if view.exec_id != exec_id:
            raise GuestError("boxd answered for another command")
        return view

    async def _ask(self, method: str, target: str, body: dict[str, Any] | None = None, *, timeout: float = ANSWER) -> dict[str, Any]:
        encoded = _json(body) if body is not None else b""
        return await self._pool.ask(self._request(method, target, encoded), encoded, timeout)

    def _request(self, method: str, target: str, body: bytes = b"", *, upgrade: str | None = None) -> h11.Request:
        headers = [("Host", "boxd"), ("Authorization", f"Bearer {self._token}"), ("Content-Length", str(len(body)))]
        if upgrade:
            headers += [("Connection", "Upgrade"), ("Upgrade", upgrade)]
        return h11.Request(method=method, target=target, headers=headers)


class AttachedCommand:
    """boxd's frames (image/boxd/protocol.Frame) as they are, both ways; the last one from the box is EXIT."""

    def __init__(self, connection: Connection) -> None:
        self._stream = connection.stream
        self._early = connection.trailing()
        self._sending = trio.StrictFIFOLock()

    async def send(self, data: bytes) -> None:
        """Whole frames, or the next part of one; any task, one after another. Waits while the box takes no more."""
        try:
            async with self._sending:
                await self._stream.send_all(data)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LostError("the connection to the attached command was lost", cause=str(error)) from error

    async def receive(self) -> bytes:
        """The next bytes of frames; b"" at the end."""
        early, self._early = self._early, b""
        try:
            return early or bytes(await self._stream.receive_some(CHUNK))
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LostError("the connection to the attached command was lost", cause=str(error)) from error


async def _piece(connection: Connection) -> bytes:
    with within(PIECE):
        return await connection.body()


def _path(exec_id: str) -> str:
    if not re.fullmatch(EXEC_ID, exec_id):
        raise BadRequest(f"execId {exec_id[:64]!r} is none", remedy="Use 1 to 64 letters, digits, - and _.")
    return f"/v1/commands/{exec_id}"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps({to_camel(name): item for name, item in value.items()}, ensure_ascii=False).encode()


def _shaped(cls: type[Value], answer: dict[str, Any]) -> Value:
    try:
        return TypeAdapter(cls).validate_python({to_snake(name): value for name, value in answer.items()})
    except ValidationError as error:
        raise GuestError(f"boxd's answer is no {cls.__name__}", cause=_first(error)) from error


def _view(cls: type[View], answer: Any) -> View:
    try:
        return cls.model_validate(answer)
    except ValidationError as error:
        raise GuestError(f"boxd's answer is no {cls.__name__}", cause=_first(error)) from error


def _first(error: ValidationError) -> str:
    """What is wrong with the first field, without its value: that is the guest's and may be long."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(str(part)[:64] for part in first['loc'][:4])}: {first['msg'][:200]}"


def _number(response: Head, name: bytes) -> int:
    value = dict(response.headers).get(name, b"")
    if not re.fullmatch(rb"[0-9]{1,15}", value):
        raise GuestError(f"boxd's answer has no {name.decode()}")
    return int(value)
