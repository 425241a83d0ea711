"""MCP servers to be measured, each in a process of its own so that the client's work costs it nothing:

    python -m tests.bench.servers coordinator    all of the coordinator before a node in memory
    python -m tests.bench.servers trivial        the coordinator's endpoint, keys and database with one trivial tool
    python -m tests.bench.servers bare           the SDK's own server with the same tool, on the same hypercorn and trio

Says {"url", "key"} as its first line and serves until its standard input ends.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mcp_types as types
import trio
from mcp.server.lowlevel import Server

from coordinator.app import make_public
from coordinator.context import open_context
from coordinator.mcp.calls import Calls
from coordinator.mcp.endpoint import Endpoint
from tests.unit.fleets import open_fleet
from tests.unit.mcp_server import served
from tools.context import Context
from tools.tool import Input, Result, Tool


class Echo(Input):
    text: str


async def echo(context: Context, arguments: Echo) -> Result:
    return Result({"text": arguments.text})


ECHO = Tool("echo", "Echo", "Says it again.", Echo, "none", echo, read_only=True)


@asynccontextmanager
async def coordinator(folder: Path) -> AsyncIterator[tuple[str, str]]:
    async with open_fleet(folder) as fleet, served(make_public(fleet.services)) as url, trio.open_nursery() as nursery:
        await fleet.enrol()
        nursery.start_soon(fleet.keep_beating)
        yield url, (await fleet.services.keys.create("bench"))[0]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def trivial(folder: Path) -> AsyncIterator[tuple[str, str]]:
    async with open_fleet(folder) as fleet:
        services = fleet.services
        context, observe = partial(open_context, services), services.metrics.tool_call
        calls = Calls(services.nursery, services.database, context, clock=services.clock, observe=observe, tools={"echo": ECHO})
        async with served(Endpoint(calls, services.keys, public_url=services.public_url)) as url:
            yield url, (await services.keys.create("bench"))[0]


@asynccontextmanager
async def bare(folder: Path) -> AsyncIterator[tuple[str, str]]:
    async def call(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        text = json.dumps({"text": (params.arguments or {})["text"]})
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)])

    server = Server[Any]("bare", on_call_tool=call)
    app = server.streamable_http_app()
    async with server.session_manager.run(), served(app) as url:
        yield url, "none"


SERVERS = {"coordinator": coordinator, "trivial": trivial, "bare": bare}


async def serve(opened: AbstractAsyncContextManager[tuple[str, str]]) -> None:
    async with opened as (url, key):
        print(json.dumps({"url": url, "key": key}), flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        trio.run(serve, SERVERS[sys.argv[1]](Path(folder)))
