"""The whole way through MCP with a real microVM: start, work, freeze, thaw, stop."""

from __future__ import annotations

import json

from tests.box.fleet import Fleet


async def test_an_agent_starts_a_box_works_in_it_freezes_and_thaws_it_and_stops_it(fleet: Fleet) -> None:
    async with fleet.agent() as agent:
        box = await agent.start("first")
        assert await agent.run(box, "echo hello; uname -s") == "hello\nLinux"
        await agent.run(box, "echo kept > /work/note; echo also > /root/note")
        assert fleet.change(box, "freeze")["state"] == "frozen"
        assert (await agent.call("sandbox_status", id=box))["status"] == "frozen"
        assert await agent.run(box, "cat /work/note /root/note") == "kept\nalso"
        stopped = await agent.call("sandbox_stop", id=box)
        assert await agent.call("sandbox_stop", id=box) == stopped
        assert (await agent.call("sandbox_status", id=box))["status"] == "archived"
        assert await agent.run(box, "cat /work/note /root/note") == "kept\nalso"
        await agent.call("sandbox_stop", id=box, delete=True)
        assert [known for known in (await agent.call("sandbox_list"))["boxes"] if known["id"] == box and known["status"] != "stopped"] == []


async def test_boxctl_tells_what_runs(fleet: Fleet) -> None:
    told = json.loads(fleet.boxctl("status", "--json").stdout)
    assert told["coordinator"]["pid"] != told["node"]["pid"]
    assert told["boxes"] == []
