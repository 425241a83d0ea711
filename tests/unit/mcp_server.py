"""The MCP endpoint for tests: tools made for the wire, fakes at its borders, in memory or on a real hypercorn on loopback."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from coordinator.mcp.calls import Calls, Tell
from coordinator.mcp.endpoint import Endpoint
from coordinator.store.database import Database, open_database
from coordinator.store.keys import Key
from coordinator.store.migrations import MIGRATIONS
from tools.context import Boxes, Caller, Context, ToolError, Words
from tools.tool import Image, Input, Result, Tool

KEY = "psbx_test"
AUTH = {"authorization": f"Bearer {KEY}"}
BOTH = {**AUTH, "accept": "application/json, text/event-stream", "content-type": "application/json"}


NO_BOXES, NO_WORDS = cast(Boxes, None), cast(Words, None)  # the wire's tools touch neither


class OneKey:
    """Knows two keys of two accounts; `broken` makes it fail like a database that is gone."""

    broken = False

    async def verify(self, secret: str) -> Key | None:
        if self.broken:
            raise OSError("disk gone")
        return {KEY: Key(1, "laptop", "main", 0, None, None), "psbx_other": Key(2, "other", "theirs", 0, None, None)}.get(secret)


class MemoryDatabase:
    """The same schema and the same functions, at once and in memory, for tests that own the clock."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.row_factory = sqlite3.Row
        for script in MIGRATIONS:
            self.connection.executescript(script)

    async def run(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return work(self.connection, *args, **kwargs)


@dataclass
class WireContext:
    caller: Caller
    tell: Tell
    gate: Gate
    boxes: Boxes = NO_BOXES
    words: Words = NO_WORDS

    async def progress(self, message: str, fraction: float | None = None) -> None:
        self.tell(message, fraction)


@dataclass
class Gate:
    """What the wire's tools wait for and leave behind."""

    open: trio.Event = field(default_factory=trio.Event)
    began: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    runs: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    observed: list[tuple[str, str]] = field(default_factory=list)

    @asynccontextmanager
    async def context(self, caller: Caller, progress: Tell) -> AsyncIterator[Context]:
        yield WireContext(caller, progress, self)

    def observe(self, tool: str, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.observed.append((tool, outcome))


class Nothing(Input):
    pass


class Echo(Input):
    text: str


async def _echo(context: Context, arguments: Echo) -> Result:
    caller = context.caller
    return Result({"text": arguments.text, "conversation": caller.conversation, "client": caller.client, "waitSec": caller.wait_sec})


async def _slow(context: Context, _: Nothing) -> Result:
    gate = cast(WireContext, context).gate
    gate.runs.append(context.caller.call)
    gate.began.set()
    await context.progress("begun", 0.25)
    await gate.open.wait()
    gate.finished.append(context.caller.call)
    gate.ended.set()
    return Result({"done": True, "call": context.caller.call})


async def _shot(context: Context, _: Nothing) -> Result:
    return Result({"path": "/work/.sbx/a.png"}, more=("credits: none needed", Image(b"\x89PNG", "image/png")))


async def _broken(context: Context, _: Nothing) -> Result:
    raise RuntimeError("password=hunter2, fetch failed: network terminated")


async def _full(context: Context, _: Nothing) -> Result:
    raise ToolError("no_capacity", "503 no box capacity right now", cause="2 of 2 in use", remedy="Come back in about 5 minutes.")


def _tool(name: str, takes: type[Any], run: Any, **more: Any) -> Tool[Any]:
    return Tool(name, name.title(), f"The wire's {name}.", takes, "none", run, **more)


WIRE = {
    tool.name: tool
    for tool in (
        _tool("echo", Echo, _echo, read_only=True),
        _tool("slow", Nothing, _slow, resumable=True),
        _tool("once", Nothing, _slow),
        _tool("shot", Nothing, _shot),
        _tool("broken", Nothing, _broken),
        _tool("full", Nothing, _full),
    )
}


@asynccontextmanager
async def endpoint(
    database: object, gate: Gate, *, tools: Mapping[str, Tool[Any]] = WIRE, keys: OneKey | None = None
) -> AsyncIterator[Endpoint]:
    """Leaving it cuts all calls, as a restart of the coordinator does."""
    async with trio.open_nursery() as nursery:
        calls = Calls(nursery, cast(Database, database), gate.context, clock=time.time, observe=gate.observe, tools=tools)
        yield Endpoint(calls, keys or OneKey(), public_url="https://boxes.example.org")
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """The application on a real hypercorn; yields the URL of /mcp."""
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.graceful_timeout = 0.2
    config.errorlog = None
    config.keep_alive_max_requests = 1_000_000  # hypercorn's 1000 drops a client in the middle
    stop = trio.Event()

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for event in ("lifespan.startup", "lifespan.shutdown"):
            await receive()
            await send({"type": f"{event}.complete"})

    async with trio.open_nursery() as nursery:
        binds: list[str] = await nursery.start(partial(serve, asgi, config, shutdown_trigger=stop.wait, mode="asgi"))
        try:
            yield f"{binds[0]}/mcp"
        finally:
            stop.set()


@asynccontextmanager
async def running(folder: Path, gate: Gate, **more: Any) -> AsyncIterator[str]:
    async with open_database(folder / "coordinator.db") as database, endpoint(database, gate, **more) as app, served(app) as url:
        yield url


@dataclass
class Exchange:
    """One request straight into the application, no sockets: for tests that own the clock or leave in the middle."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    sent: list[tuple[float, bytes]] = field(default_factory=list)  # when, what
    left: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    _asked: bool = False
    _content: bytes = b""

    async def run(self, app: Endpoint, method: str = "POST", message: object = None, headers: Mapping[str, str] = BOTH) -> Exchange:
        self._content = message if isinstance(message, bytes) else json.dumps(message).encode()
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        await app({"type": "http", "method": method, "headers": fields}, self._receive, self._send)
        self.ended.set()
        return self

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        if event["type"] == "http.response.start":
            self.status = event["status"]
            self.headers = {name.decode(): value.decode() for name, value in event["headers"]}
        else:
            self.body += event["body"]
            self.sent.append((trio.current_time(), event["body"]))

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str | None, Any]]:
        return sse(self.body.decode())


def sse(text: str) -> list[tuple[str | None, Any]]:
    """(id, message) of every event that carries a message."""
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line and not line.startswith(":"))
        if "data" in lines:
            events.append((lines.get("id"), json.loads(lines["data"])))
    return events


def call(tool: str, arguments: object = None, *, request: int | str = 1, token: object = None) -> dict[str, Any]:
    params: dict[str, Any] = {"name": tool, "arguments": arguments or {}}
    if token is not None:
        params["_meta"] = {"progressToken": token}
    return {"jsonrpc": "2.0", "id": request, "method": "tools/call", "params": params}
