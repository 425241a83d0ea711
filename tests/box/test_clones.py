"""Boxes started at once from one template: all come up, and no two have anything in common that should be one's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from node.config import NodeConfig, Places
from node.net import network
from tests.box.fleet import Agent, Fleet

COUNT = 8
HELLO = """
import ssl
hello = ssl.MemoryBIO()
client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
try:
    client.do_handshake()
except ssl.SSLWantReadError:
    print(hello.read()[11:43].hex())  # behind the headers of record and message and the version
"""
OF_ITS_OWN = {
    "urandom": "head -c 32 /dev/urandom | base64",
    "uuid4": 'python3 -c "import uuid; print(uuid.uuid4())"',
    "kernel uuid": "cat /proc/sys/kernel/random/uuid",
    "machine-id": "cat /etc/machine-id",
    "hostname": "hostname",
    "TLS hello": f"python3 -c '{HELLO}'",
}


@pytest.fixture(scope="module")
def clones(fleet: Fleet) -> Iterator[list[str]]:
    started: list[str] = []

    async def start(number: int) -> None:
        async with fleet.agent(f"agent-of-clone-{number}") as agent:
            started.append(await agent.start(f"clone {number}"))

    async def start_all() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(COUNT):
                nursery.start_soon(start, number)

    try:
        trio.run(start_all)
        yield started
    finally:
        for box in started:
            fleet.destroy(box)


# report 43, 44
async def test_boxes_started_at_once_are_all_ready_each_with_an_id_a_process_and_an_address_of_its_own(
    fleet: Fleet, clones: list[str]
) -> None:
    views = [fleet.view(box) for box in clones]
    assert [view["state"] for view in views] == ["ready"] * COUNT
    assert len(set(clones)) == len({view["pid"] for view in views}) == COUNT
    places = Places(fleet.state / "config.toml", fleet.state / "lib", fleet.state / "run")
    slots = await network.list_networks(NodeConfig(places))
    assert len({slots[box].inner for box in clones}) == len({slots[box].link for box in clones}) == COUNT


@pytest.mark.parametrize("what", OF_ITS_OWN)
async def test_no_two_clones_have_the_same(clones: list[str], agent: Agent, what: str) -> None:  # report 17
    told = [await agent.run(box, OF_ITS_OWN[what]) for box in clones]
    assert all(told)
    assert len(set(told)) == COUNT, told
