"""Boxes as a caller meets them: started once, listed at once, used, stopped, and nobody else's."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from coordinator.boxes import CallerBoxes
from node.protocol import Hop
from tests.unit.fake_node import FakeNode, problem
from tests.unit.fleets import Fleet, caller, open_fleet, patient_clock
from tools.context import ToolError


@pytest.fixture
def clock() -> MockClock:
    return patient_clock()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(tmp_path) as opened:
        yield opened


@pytest.fixture
async def node(fleet: Fleet) -> FakeNode:
    return await fleet.enrol()


async def start(boxes: CallerBoxes, goal: str = "fix the test", **other: Any) -> dict[str, Any]:
    wishes: dict[str, Any] = {"name": "", "size": 1, "flavour": None, "wait_for_capacity_sec": 0.0, "restore": None, **other}
    return await boxes.start(goal=goal, **wishes)


async def run(boxes: CallerBoxes, box: str, cmd: str = "true", **other: Any) -> dict[str, Any]:
    how = {"note": "look", "cwd": "/work", "user": "root", "env": {}, "timeout_sec": None, "background": False, "exec_id": None} | other
    return await boxes.exec(box, cmd=cmd, **how)


async def refusal(work: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await work
    return caught.value


async def test_a_started_box_is_ready_and_belongs_to_the_conversation(fleet: Fleet, node: FakeNode) -> None:
    box = await start(fleet.boxes(), name="a\tb\n" + "x" * 90)
    assert box["status"] == "ready"
    assert box["name"] == "a b " + "x" * 56
    assert box["flavour"] == "core"
    assert box["agent"]["thisConversation"]
    assert list(node.boxes) == [box["id"]]


async def test_a_box_is_listed_as_soon_as_its_start_begins(
    fleet: Fleet, node: FakeNode, nursery: trio.Nursery, clock: MockClock
) -> None:
    node.start_takes = 60.0
    nursery.start_soon(start, fleet.boxes())
    await trio.sleep(1)
    [box] = await fleet.boxes().list()
    assert box["status"] in {"claimed", "starting"}
    assert box["goal"] == "fix the test"


async def test_twenty_equal_starts_at_once_are_one_box(fleet: Fleet, node: FakeNode, clock: MockClock) -> None:  # reports 43, 44
    node.start_takes = 1.0
    answers: list[dict[str, Any]] = []

    async def one() -> None:
        answers.append(await start(fleet.boxes()))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(one)
    assert len({answer["id"] for answer in answers}) == 1
    assert sum("reused" not in answer for answer in answers) == 1
    assert node.asked["start"] == 1


async def test_fifty_starts_at_once_are_fifty_boxes_and_no_node_gets_too_many(fleet: Fleet, clock: MockClock) -> None:  # report 43
    nodes = [await fleet.enrol(f"host{i}", units=26, start_takes=1.0) for i in range(2)]
    answers: list[dict[str, Any]] = []

    async def one(number: int) -> None:
        answers.append(await start(fleet.boxes(), goal=f"goal {number}"))

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(one, number)
    assert len({answer["id"] for answer in answers}) == 50
    assert [node.asked["start"] for node in nodes] == [len(node.boxes) for node in nodes], "no start was refused by its node"


async def test_a_repeated_start_within_a_minute_is_the_same_box_and_later_another(fleet: Fleet, node: FakeNode) -> None:  # CONTRACT 9.19
    first = await start(fleet.boxes())
    again = await start(fleet.boxes())
    assert again["id"] == first["id"]
    assert again["reused"]
    other = await start(fleet.boxes(caller("agent-2")))
    assert other["id"] != first["id"]
    await fleet.later(61)
    assert (await start(fleet.boxes()))["id"] != first["id"]


async def test_who_stops_waiting_for_a_start_does_not_stop_it(fleet: Fleet, node: FakeNode, clock: MockClock) -> None:
    node.start_takes = 5.0
    with trio.move_on_after(1):
        await start(fleet.boxes())
    await trio.sleep(10)
    [box] = await fleet.boxes().list()
    assert box["status"] == "ready"


async def test_an_exec_on_a_starting_box_waits_for_it(fleet: Fleet, node: FakeNode, nursery: trio.Nursery, clock: MockClock) -> None:
    node.start_takes = 5.0
    nursery.start_soon(start, fleet.boxes())
    await trio.sleep(1)
    [box] = await fleet.boxes().list()
    assert (await run(fleet.boxes(), box["id"]))["exitCode"] == 0


async def test_a_node_without_room_is_passed_over_for_another(fleet: Fleet) -> None:  # report 69
    full = await fleet.enrol("full", units=9)
    other = await fleet.enrol("other", units=8)
    full.faults["start"] = [problem("no_capacity")]
    box = await start(fleet.boxes())
    assert list(other.boxes) == [box["id"]]


async def test_a_node_that_fails_is_excluded_and_what_it_began_is_removed(fleet: Fleet) -> None:  # report 69
    broken = await fleet.enrol("broken", units=9)
    other = await fleet.enrol("other", units=8)
    broken.faults["start"] = [problem("vm_failed", Hop.VM)]
    box = await start(fleet.boxes())
    assert list(other.boxes) == [box["id"]]
    assert broken.asked["destroy"] == 1


async def test_the_last_nodes_error_is_told_and_the_box_is_shown_as_failed(fleet: Fleet, node: FakeNode) -> None:
    node.faults["start"] = [problem("vm_failed", Hop.VM, "QEMU ended with 1")]
    error = await refusal(start(fleet.boxes()))
    assert (error.code, error.hop) == ("vm_failed", "vm")
    [box] = await fleet.boxes().list()
    assert box["status"] == "failed"
    assert box["problem"]["message"] == "QEMU ended with 1"
    assert (await refusal(run(fleet.boxes(), box["id"]))).code == "vm_failed"


async def test_without_room_the_figures_are_told(fleet: Fleet, node: FakeNode) -> None:  # report 71
    node.units = 1
    await fleet.beat()
    await start(fleet.boxes(), goal="one")
    error = await refusal(start(fleet.boxes(), goal="two"))
    assert error.code == "no_capacity"
    assert "memory 1.0 of 1.0 GiB" in error.cause


async def test_a_refused_start_leaves_no_box_behind(fleet: Fleet, node: FakeNode) -> None:
    node.units = 0
    await fleet.beat()
    for goal in ("one", "two"):
        assert (await refusal(start(fleet.boxes(), goal=goal))).code == "no_capacity"
    assert await fleet.boxes().list() == []


async def test_room_that_came_free_since_the_last_heartbeat_is_seen(fleet: Fleet, node: FakeNode) -> None:
    node.units = 1
    first = await start(fleet.boxes(), goal="one")
    await fleet.beat()
    await fleet.boxes().stop(first["id"], delete=True)
    assert (await start(fleet.boxes(), goal="two"))["status"] == "ready"


async def test_a_patient_start_gets_the_room_that_comes_free(fleet: Fleet, node: FakeNode, nursery: trio.Nursery, clock: MockClock) -> None:
    node.units = 1
    first = await start(fleet.boxes(), goal="one")
    nursery.start_soon(fleet.keep_beating)
    waiting: list[dict[str, Any]] = []

    async def patient() -> None:
        waiting.append(await start(fleet.boxes(), goal="two", wait_for_capacity_sec=120.0))

    async with trio.open_nursery() as starts:
        starts.start_soon(patient)
        await trio.sleep(20)
        assert not waiting
        await fleet.boxes().stop(first["id"], delete=False)
    assert waiting[0]["status"] == "ready"
    nursery.cancel_scope.cancel()


async def test_an_image_that_no_node_has_is_named(fleet: Fleet, node: FakeNode) -> None:
    error = await refusal(start(fleet.boxes(), flavour="full"))
    assert error.code == "image_missing"
    assert "core" in error.cause


async def test_the_goal_is_required(fleet: Fleet, node: FakeNode) -> None:
    assert (await refusal(start(fleet.boxes(), goal=" \n"))).message == "goal is required"


async def test_a_box_of_another_account_does_not_exist(fleet: Fleet, node: FakeNode) -> None:
    box = (await start(fleet.boxes()))["id"]
    theirs = fleet.boxes(caller(account="other"))
    calls = (theirs.status(box), run(theirs, box), theirs.commands(box), theirs.say(box, "hi"), theirs.stop(box, delete=True))
    assert [(await refusal(call)).code for call in calls] == ["box_not_found"] * 5
    assert await theirs.list() == []


async def test_steps_tell_what_was_done_but_not_the_clients_own_uploads(fleet: Fleet, node: FakeNode) -> None:  # CONTRACT 6
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    node.answer = lambda command: (3, b"", b"")
    await run(boxes, box, "npm test", note="run the tests", cwd="/work/app")
    await run(boxes, box, "node /work/.psbx-sync/0123456789ab/compare.mjs x")
    [step] = (await boxes.status(box))["steps"]
    assert {name: step[name] for name in ("tool", "cmd", "dir", "note", "exitCode")} == {
        "tool": "sandbox_exec", "cmd": "npm test", "dir": "/work/app", "note": "run the tests", "exitCode": 3,
    }  # fmt: skip


async def test_only_the_last_thirty_steps_are_kept(fleet: Fleet, node: FakeNode) -> None:
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    for number in range(33):
        await run(boxes, box, f"echo {number}")
    steps = (await boxes.status(box))["steps"]
    assert [step["cmd"] for step in steps] == [f"echo {number}" for number in range(3, 33)]


async def test_a_failed_exec_is_a_step_with_its_error(fleet: Fleet, node: FakeNode) -> None:
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    node.faults["exec"] = [problem("guest_oom", Hop.GUEST, "The guest ran out of memory")]
    assert (await refusal(run(boxes, box))).hop == "guest"
    assert (await boxes.status(box))["steps"][0]["error"] == "The guest ran out of memory"


async def test_bytes_that_are_no_text_come_exactly(fleet: Fleet, node: FakeNode) -> None:  # report 10
    data = bytes(range(256)) * 8
    node.answer = lambda command: (0, data, "grün".encode())
    box = (await start(fleet.boxes()))["id"]
    result = await run(fleet.boxes(), box)
    assert base64.b64decode(result["stdoutBase64"]) == data
    assert result["stderr"] == "grün"
    assert "stderrBase64" not in result


async def test_cut_output_says_so_and_the_rest_is_at_its_url(fleet: Fleet, node: FakeNode) -> None:  # reports 1, 2
    node.answer = lambda command: (0, b"x" * 20_000, b"")
    box = (await start(fleet.boxes()))["id"]
    result = await run(fleet.boxes(), box, exec_id="e1")
    assert result["truncated"]
    assert result["stdoutBytes"] == 20_000
    assert len(result["stdout"]) == 16 * 1024
    assert result["outputUrl"].startswith(f"http://127.0.0.1:7080/v1/boxes/{box}/outputs/e1/stdout?expires=")


async def test_background_commands_can_be_followed_and_stopped(fleet: Fleet, node: FakeNode) -> None:  # report 7
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    begun = await run(boxes, box, "npm run dev", background=True)
    assert begun["bgId"]
    assert begun["pid"] == 42
    [mine] = await boxes.commands(box)
    assert mine["running"]
    assert mine["mine"]
    [theirs] = await fleet.boxes(caller("agent-2")).commands(box)
    assert not theirs["mine"]
    assert (await boxes.stop_command(box, begun["bgId"]))["endReason"] == "stopped"


async def test_a_foreground_exec_is_found_again_by_its_id(fleet: Fleet, node: FakeNode) -> None:  # CONTRACT 0.12
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    await run(boxes, box, "make", exec_id="0123456789abcdef")
    waited = await boxes.wait_command(box, "0123456789abcdef", wait_sec=1, until="exited", ready_port=None, ready_log=None)
    assert waited["exitCode"] == 0
    again = await run(boxes, box, "make", exec_id="0123456789abcdef")
    assert again["exitCode"] == 0
    assert len((await boxes.status(box))["steps"]) == 1


async def test_an_unknown_command_is_told_in_the_clients_words(fleet: Fleet, node: FakeNode) -> None:
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    error = await refusal(boxes.wait_command(box, "nope", wait_sec=0, until="exited", ready_port=None, ready_log=None))
    assert (error.code, error.message) == ("command_not_found", "bgId not found: nope")


@pytest.mark.parametrize("hostile", ["../../other/freeze", "a/b", "x?y", "", "é", "a\n"])
async def test_what_is_no_exec_id_never_reaches_a_node(fleet: Fleet, node: FakeNode, hostile: str) -> None:
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    assert (await refusal(boxes.stop_command(box, hostile))).code == "command_not_found"
    assert node.asked["stop_command"] == 0


async def test_looking_never_wakes_and_use_shows_the_box_awake(fleet: Fleet, node: FakeNode) -> None:
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    assert (await boxes.freeze(box))["status"] == "frozen"
    assert (await boxes.status(box))["status"] == "frozen"
    assert (await boxes.list())[0]["status"] == "frozen"
    await run(boxes, box)
    assert (await boxes.list())[0]["status"] == "ready"


async def test_a_stop_archives_tells_unsaved_work_and_repeats_its_answer(fleet: Fleet, node: FakeNode) -> None:
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    first = await boxes.stop(box, delete=False)
    assert first["status"] == "archived"
    assert first["unsavedWork"]["repositories"][0]["path"] == "/work/app"
    await fleet.later(300)
    assert await boxes.stop(box, delete=False) == first
    assert node.asked["archive"] == 1


async def test_a_delete_deletes_and_repeats_its_answer(fleet: Fleet, node: FakeNode) -> None:
    boxes = fleet.boxes()
    box = (await start(boxes))["id"]
    first = await boxes.stop(box, delete=True)
    assert first["status"] == "stopped"
    assert node.boxes == {}
    assert await boxes.stop(box, delete=True) == first
    assert await boxes.list() == []
    assert (await refusal(run(boxes, box))).code == "box_gone"


async def test_a_start_right_after_a_stop_is_a_new_box(fleet: Fleet, node: FakeNode) -> None:
    first = await start(fleet.boxes())
    await fleet.boxes().stop(first["id"], delete=False)
    assert (await start(fleet.boxes()))["id"] != first["id"]


async def test_an_archived_box_comes_back_to_who_restores_it(fleet: Fleet, node: FakeNode) -> None:
    box = (await start(fleet.boxes()))["id"]
    await fleet.boxes().stop(box, delete=False)
    other = fleet.boxes(caller("agent-2"))
    restored = await start(other, goal="go on", restore=box)
    assert (restored["id"], restored["status"], restored["goal"]) == (box, "ready", "go on")
    assert restored["agent"]["thisConversation"]
    await other.stop(box, delete=False)
    assert node.asked["archive"] == 2, "a box that was restored is stopped anew"


async def test_what_was_said_is_shown(fleet: Fleet, node: FakeNode) -> None:
    box = (await start(fleet.boxes()))["id"]
    await fleet.boxes().say(box, "running\nthe tests")
    assert (await fleet.boxes().status(box))["said"]["text"] == "running the tests"


async def test_feedback_is_kept_and_names_own_boxes_only(fleet: Fleet, node: FakeNode) -> None:
    words = fleet.services.words.for_caller(caller())
    said = {"task": "t", "usage": "u", "problems": "none", "suggestions": "s"}
    assert (await words.feedback(**said, box=None))["ok"]
    assert (await refusal(words.feedback(**said, box="aaaaaaaaaaaa"))).code == "box_not_found"
