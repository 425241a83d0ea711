"""The node keeps its clocks alone, and nothing is lost when a daemon ends. Within this file the fleet's clocks are short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.cli.daemons import Daemon
from node.config import Places
from tests.box.fleet import DOWN_WITHIN, Fleet

SHORT_CLOCKS = "[node.clocks]\nfreeze_after = 2"


@pytest.fixture(scope="module", autouse=True)
def short_clocks(fleet: Fleet) -> Iterator[None]:
    fleet.down()
    fleet.configure(node=SHORT_CLOCKS)
    fleet.up()
    yield
    fleet.destroy_all()
    fleet.down()
    fleet.configure()
    fleet.up()


def end(fleet: Fleet, name: str) -> None:
    """SIGTERM to a daemon, as systemd or a person sends it; returns when it has ended."""
    daemon = Daemon(name, Places(fleet.state / "config.toml", fleet.state / "lib", fleet.state / "run"))
    pid = daemon.pid()
    assert pid
    assert daemon.stop(pid, deadline=DOWN_WITHIN)


async def test_without_a_coordinator_an_idle_box_freezes_on_time_also_after_each_wake(fleet: Fleet) -> None:  # report 25, 64
    box = fleet.start("idle")
    end(fleet, "coordinator")
    await fleet.until(box, "frozen")
    for _ in range(2):
        assert fleet.change(box, "thaw")["state"] == "ready"
        await fleet.until(box, "frozen")
    fleet.up()
    async with fleet.agent() as agent:
        assert await agent.run(box, "echo awake") == "awake"


async def test_a_running_command_keeps_its_box_awake(fleet: Fleet) -> None:  # report 29
    busy, idle = fleet.start("busy"), fleet.start("idle")
    async with fleet.agent() as agent:
        command = await agent.call("sandbox_exec", id=busy, cmd="sleep 900", note="long work", background=True)
        await agent.run(idle, "true")  # used last, and yet the first to freeze
        await fleet.until(idle, "frozen")
        assert fleet.view(busy)["state"] == "ready"
        await agent.call("sandbox_procs", id=busy, action="stop", bgId=command["bgId"])
        await fleet.until(busy, "frozen")


async def test_a_node_that_is_ended_freezes_its_boxes_and_up_brings_them_back(fleet: Fleet) -> None:  # report 66
    box = fleet.start("kept")
    async with fleet.agent() as agent:
        command = await agent.call("sandbox_exec", id=box, cmd="sleep 900", note="long work", background=True)
        qemu = fleet.view(box)["pid"]
    end(fleet, "node")
    assert not Path(f"/proc/{qemu}").exists()
    fleet.up()
    assert fleet.view(box)["state"] == "frozen"
    async with fleet.agent() as agent:
        known = (await agent.commands(box))[command["bgId"]]
        assert (known["running"], known["pid"]) == (True, command["pid"])
