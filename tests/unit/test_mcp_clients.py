"""Others' clients against the endpoint on a real hypercorn: the Python SDK in both eras, and plain HTTP where the SDK hides the wire."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import httpx2
import pytest
import trio
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import TextContent

from coordinator.mcp.endpoint import Endpoint
from coordinator.store.database import open_database
from tests.unit.mcp_server import AUTH, BOTH, WIRE, Gate, call, endpoint, running, served, sse
from tools.table import BY_NAME

ERAS = ["legacy", "auto", "2026-07-28"]

# The SDK's client leaves its event streams to the garbage collector, which trio mentions.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@asynccontextmanager
async def connected(url: str, mode: str) -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers=AUTH, timeout=10) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


def data(result: Any) -> Any:
    assert isinstance(result.content[0], TextContent)
    return json.loads(result.content[0].text)


@pytest.mark.parametrize("mode", ERAS)
async def test_the_sdks_client_lists_and_calls_in_both_eras(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, Gate()) as url, connected(url, mode) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == list(WIRE)
        assert data(await client.call_tool("echo", {"text": "grüß"}))["text"] == "grüß"
        failed = await client.call_tool("full", {})
        assert failed.is_error
        assert data(failed)["error"]["code"] == "no_capacity"
        if mode != "2026-07-28":  # a client that is told its version asks for nothing else
            assert "sandbox_start" in (client.instructions or "")


@pytest.mark.parametrize("mode", ERAS)
async def test_the_sdks_client_sees_progress_in_both_eras(mode: str, tmp_path: Path) -> None:
    gate, heard = Gate(), []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)
        gate.open.set()

    async with running(tmp_path, gate) as url, connected(url, mode) as client:
        result = await client.call_tool("slow", {}, progress_callback=hear)
        assert data(result)["done"] is True
    assert heard == ["begun"]


@pytest.mark.parametrize("mode", ERAS)
async def test_rule_12_the_sdks_client_gives_up_and_the_work_goes_on(mode: str, tmp_path: Path) -> None:
    gate = Gate()
    async with running(tmp_path, gate) as url, connected(url, mode) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.call_tool, "slow", {})
            await gate.began.wait()
            nursery.cancel_scope.cancel()
        assert data(await client.call_tool("echo", {"text": "still here"}))["text"] == "still here"
        gate.open.set()
        with trio.fail_after(30):
            await gate.ended.wait()


async def test_the_products_own_tools_pass_the_clients_validation(tmp_path: Path) -> None:
    async with running(tmp_path, Gate(), tools=BY_NAME) as url, connected(url, "auto") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == list(BY_NAME)
        refused = await client.call_tool("sandbox_start", {"name": "a"})
        assert refused.is_error
        assert "goal is required" in data(refused)["error"]["message"]


async def test_rule_8_the_sdks_client_finishes_a_call_whose_connection_was_cut_by_a_restart(tmp_path: Path) -> None:  # report 54
    gate = Gate()
    link = Link()
    results: list[Any] = []
    answered = trio.Event()

    async def agent(url: str) -> None:
        async with connected(url, "legacy") as client:
            results.append(data(await client.call_tool("slow", {})))
            answered.set()

    async with served(link) as url, trio.open_nursery() as nursery:
        async with trio.open_nursery() as first:
            await first.start(link.boot, tmp_path / "a.db", gate)
            nursery.start_soon(agent, url)
            await gate.began.wait()
            await trio.sleep(0.2)
            first.cancel_scope.cancel()  # the coordinator dies in the middle of the call
        gate.open.set()
        async with trio.open_nursery() as second:
            await second.start(link.boot, tmp_path / "a.db", gate)
            with trio.fail_after(30):
                await answered.wait()
            second.cancel_scope.cancel()
    assert results == [{"done": True, "call": gate.runs[0]}]
    assert len(gate.runs) == 2  # the tool was run again under the same call id


class Link:
    """A listening socket that outlives the coordinators behind it; the requests of one that dies are cut, new ones wait for the next."""

    def __init__(self) -> None:
        self._app: Endpoint | None = None
        self._up = trio.Event()
        self._open: set[trio.CancelScope] = set()

    async def boot(self, path: Path, gate: Gate, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with open_database(path) as database, endpoint(database, gate) as self._app:
                self._up.set()
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._up = trio.Event()
            for scope in self._open:
                scope.cancel()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._up.wait()
        assert self._app
        with trio.CancelScope() as cut:
            self._open.add(cut)
            await self._app(scope, receive, send)
        self._open.discard(cut)


async def test_rule_12_a_dropped_connection_stops_the_wait_and_not_the_work(tmp_path: Path) -> None:
    gate = Gate()
    async with running(tmp_path, gate) as url:
        host, port = url.removeprefix("http://").removesuffix("/mcp").split(":")
        stream = await trio.open_tcp_stream(host, int(port))
        body = json.dumps(call("slow")).encode()
        wire = h11.Connection(h11.CLIENT)
        head = wire.send(
            h11.Request(method="POST", target="/mcp", headers=[*BOTH.items(), ("host", "x"), ("content-length", str(len(body)))])
        )
        await stream.send_all((head or b"") + body)
        assert b"text/event-stream" in await stream.receive_some(4096)
        await stream.aclose()
        await trio.sleep(0.05)
        gate.open.set()
        with trio.fail_after(30):
            await gate.ended.wait()


async def test_a_quick_answer_is_plain_json_and_a_slow_one_a_stream(tmp_path: Path) -> None:
    gate = Gate()
    async with running(tmp_path, gate) as url, httpx2.AsyncClient(headers=BOTH) as http:
        quick = await http.post(url, json=call("echo", {"text": "a"}))
        assert quick.headers["content-type"] == "application/json"
        async with http.stream("POST", url, json=call("slow"), headers={"mcp-protocol-version": "2025-11-25"}) as slow:
            assert slow.headers["content-type"] == "text/event-stream"
            gate.open.set()
            text = "".join([chunk async for chunk in slow.aiter_text()])
        assert sse(text)[-1][1]["id"] == 1


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"mcp-protocol-version": "2099-01-01"}, 400, -32602),
        ({"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/list"}, 400, -32602),
    ],
)
async def test_a_newer_request_that_lacks_its_envelope_is_told_so(headers: dict[str, str], status: int, code: int, tmp_path: Path) -> None:
    async with running(tmp_path, Gate()) as url, httpx2.AsyncClient(headers=BOTH) as http:
        answer = await http.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
