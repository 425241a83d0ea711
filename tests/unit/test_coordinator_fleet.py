"""The fleet: nodes join, fall silent, come back and are restarted around; their boxes' states are always said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from node.protocol import Enrol
from tests.unit.fake_node import FakeNode
from tests.unit.fleets import Fleet, csr, open_fleet, patient_clock
from tests.unit.test_coordinator_boxes import refusal, run, start


@pytest.fixture
def clock() -> MockClock:
    return patient_clock()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(tmp_path) as opened:
        yield opened


async def test_an_enrolment_token_works_once_and_not_for_ever(fleet: Fleet) -> None:
    token, _ = await fleet.services.fleet.create_token("host")
    request = Enrol(token=token, csr=csr(), address="host:7082")
    assert (await fleet.services.fleet.enrol(request)).node_id.startswith("node-")
    assert (await refusal(fleet.services.fleet.enrol(request))).code == "unauthorised"
    late, _ = await fleet.services.fleet.create_token("late")
    await fleet.later(3601, beating=False)
    assert (await refusal(fleet.services.fleet.enrol(request.model_copy(update={"token": late})))).code == "unauthorised"


async def test_a_bad_request_for_a_certificate_does_not_spend_the_token(fleet: Fleet) -> None:
    token, _ = await fleet.services.fleet.create_token("host")
    assert (await refusal(fleet.services.fleet.enrol(Enrol(token=token, csr="x", address="a:1")))).code == "bad_request"
    await fleet.services.fleet.enrol(Enrol(token=token, csr=csr(), address="a:1"))


async def test_a_heartbeat_needs_the_nodes_own_token(fleet: Fleet) -> None:
    one, two = await fleet.enrol("one"), await fleet.enrol("two")
    fleet.tokens[one.id] = fleet.tokens[two.id]
    assert (await refusal(fleet.beat(one))).code == "unauthorised"


async def test_boxes_of_a_silent_node_are_unreachable_at_once_and_back_with_it(fleet: Fleet) -> None:  # report 63
    node = await fleet.enrol()
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    await fleet.later(17, beating=False)
    [shown] = await boxes.list()
    assert (shown["status"], shown["problem"]["code"]) == ("unreachable", "node_unreachable")
    with trio.fail_after(1):  # typed and at once, no timeout
        error = await refusal(run(boxes, box))
    assert (error.code, error.hop) == ("node_unreachable", "node")
    assert node.asked["exec"] == 0
    await fleet.later(300, beating=False)
    assert (await boxes.list())[0]["problem"]["code"] == "node_lost"
    await fleet.beat()
    assert (await boxes.list())[0]["status"] == "ready"
    await run(boxes, box)


async def test_a_silent_node_gets_no_new_box(fleet: Fleet) -> None:
    await fleet.enrol()
    await fleet.later(17, beating=False)
    assert (await refusal(start(fleet.boxes()))).code == "no_capacity"


async def test_a_box_that_its_node_does_not_know_is_told_as_gone_never_made_anew(fleet: Fleet) -> None:  # report 68
    node = await fleet.enrol()
    box = (await start(fleet.boxes()))["id"]
    node.boxes.clear()
    await fleet.later(16)
    [shown] = await fleet.boxes().list()
    assert (shown["status"], shown["problem"]["code"]) == ("failed", "box_gone")
    assert (await refusal(run(fleet.boxes(), box))).code == "box_gone"
    assert node.asked["start"] == 1


async def test_a_box_that_the_database_does_not_know_is_an_orphan_and_left_alone(fleet: Fleet) -> None:
    node = await fleet.enrol()
    box = (await start(fleet.boxes()))["id"]
    node.boxes["orphan000000"] = node.boxes[box].model_copy(update={"id": "orphan000000"})
    await fleet.beat()
    assert [(where, view.id) for where, view in fleet.services.fleet.orphans()] == [(node.id, "orphan000000")]
    assert "orphan000000" in node.boxes


async def test_an_archived_box_that_its_node_deleted_in_time_is_gone_from_the_list(fleet: Fleet) -> None:
    node = await fleet.enrol()
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    await boxes.stop(box, delete=False)
    await fleet.beat()
    node.boxes.clear()
    await fleet.later(31 * 86_400)
    assert await boxes.list() == []


async def test_a_removed_nodes_boxes_say_so(fleet: Fleet) -> None:
    node = await fleet.enrol()
    box = (await start(fleet.boxes()))["id"]
    assert await fleet.services.fleet.remove(node.id)
    assert (await fleet.boxes().list())[0]["problem"]["code"] == "node_removed"
    assert (await refusal(run(fleet.boxes(), box))).code == "box_gone"
    assert (await fleet.boxes().stop(box, delete=True))["status"] == "stopped", "it can be taken off the list"
    assert await fleet.boxes().list() == []


async def test_a_restart_keeps_list_and_connections(tmp_path: Path, clock: MockClock) -> None:  # report 66
    async with open_fleet(tmp_path) as before:
        await before.enrol()
        box = (await start(before.boxes()))["id"]
    async with open_fleet(tmp_path, known=before) as after:
        assert [shown["status"] for shown in await after.boxes().list()] == ["ready"], "as the node last said"
        assert (await run(after.boxes(), box))["exitCode"] == 0, "before any heartbeat"


async def test_a_restart_takes_up_the_start_that_was_under_way(tmp_path: Path, clock: MockClock) -> None:
    async with open_fleet(tmp_path) as before, trio.open_nursery() as nursery:
        (await before.enrol()).start_takes = 30.0
        nursery.start_soon(start, before.boxes())
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    async with open_fleet(tmp_path, known=before) as after, trio.open_nursery() as nursery:
        [node] = after.nodes.values()
        node.start_takes = 0.0
        node.boxes.clear()
        nursery.start_soon(after.keep_beating)
        await trio.sleep(20)
        [box] = await after.boxes().list()
        assert box["status"] == "ready"
        assert list(node.boxes) == [box["id"]]
        nursery.cancel_scope.cancel()


async def test_starts_after_a_restart_wait_for_the_first_heartbeats(tmp_path: Path, clock: MockClock) -> None:
    async with open_fleet(tmp_path) as before:
        await before.enrol()
    async with open_fleet(tmp_path, known=before) as after, trio.open_nursery() as nursery:
        nursery.start_soon(after.keep_beating)
        assert (await start(after.boxes()))["status"] == "ready"
        nursery.cancel_scope.cancel()


async def test_a_development_node_serves_only_a_development_fleet(tmp_path: Path, clock: MockClock) -> None:
    async with open_fleet(tmp_path, development=False) as fleet:
        node: FakeNode = await fleet.enrol(accel="tcg", development=True)
        assert (await refusal(start(fleet.boxes()))).code == "no_capacity"
        assert node.asked["start"] == 0
