"""The first journey but for the microVM: the SDK's client, the endpoint, the tools, the services, a node in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from coordinator.app import make_public
from tests.unit.fleets import open_fleet
from tests.unit.mcp_server import served

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_an_agent_starts_a_box_works_in_it_and_stops_it(mode: str, tmp_path: Path) -> None:
    async with open_fleet(tmp_path) as fleet, served(make_public(fleet.services)) as url:
        await fleet.enrol()
        secret, _ = await fleet.services.keys.create("laptop")
        headers = {"authorization": f"Bearer {secret}", "x-psbx-agent": "agent-1", "x-psbx-client": "claude-code/2.1"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=10) as http,
            Client(streamable_http_client(url, http_client=http), mode=mode) as client,
        ):

            async def use(tool: str, **arguments: Any) -> dict[str, Any]:
                result = await client.call_tool(f"sandbox_{tool}", arguments)
                told: dict[str, Any] = json.loads(result.content[0].text)  # type: ignore[union-attr]
                return told | ({"isError": True} if result.is_error else {})

            box = (await use("start", name="one", goal="try it"))["id"]
            ran = await use("exec", id=box, cmd="true", note="see that it works")
            assert (ran["exitCode"], len(ran["execId"])) == (0, 16)
            listed = (await use("list"))["boxes"]
            assert [(b["id"], b["agent"]["thisConversation"], b["agent"]["client"]) for b in listed] == [(box, True, "claude-code/2.1")]
            assert (await use("status", id=box))["steps"][0]["note"] == "see that it works"
            assert [command["execId"] for command in (await use("procs", id=box))["commands"]] == [ran["execId"]]
            assert "bgId not found" in (await use("procs", id=box, action="wait", bgId="other"))["error"]["message"]
            assert (await use("say", id=box, text="done"))["ok"]
            assert (await use("feedback", task="t", usage="u", problems="none", suggestions="none")).get("isError") is None
            assert (await use("stop", id=box))["id"] == box
            assert (await use("status", id="abcdefghijkl"))["error"]["code"] == "box_not_found"
