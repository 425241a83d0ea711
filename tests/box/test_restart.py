"""A daemon that is killed and started again finds its boxes as they were."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.box.fleet import Fleet

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


async def test_a_box_runs_on_while_the_nodes_daemon_is_killed_and_started_again(fleet: Fleet) -> None:
    async with fleet.agent() as agent:
        box = await agent.start("restart")
        server = await agent.call("sandbox_exec", id=box, cmd="exec sleep 9999", note="runs on", background=True)
        before = fleet.view(box)
        os.kill(json.loads(fleet.boxctl("status", "--json").stdout)["node"]["pid"], signal.SIGKILL)
        fleet.up()
        after = fleet.view(box)
        assert (after["state"], after["pid"], after["cold"]) == ("ready", before["pid"], False)
    async with fleet.agent() as agent:
        assert await agent.run(box, f"test -d /proc/{server['pid']} && echo runs") == "runs"
        assert fleet.change(box, "freeze")["state"] == "frozen"
        assert await agent.run(box, f"test -d /proc/{server['pid']} && echo runs") == "runs"
        await agent.call("sandbox_stop", id=box, delete=True)
