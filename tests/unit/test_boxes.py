"""Boxes and their changes of state, over a fake of QEMU: what is serialised, what is kept, what is undone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from node.box import FLUSH_AFTER
from node.boxes import OVERHEAD, Boxes
from node.config import Clocks
from node.errors import BadRequest, BoxConflict, BoxNotFound, ImageMissing, NodeError, VmError
from node.operations import Operation
from node.protocol import BoxState, BoxView, Event, RunCommand, StartBox, WaitCommand
from tests.unit.fake_vms import GIB, FakeVm, FakeVms, make_host, open_boxes

BOX, OTHER = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


@pytest.fixture
def vms() -> FakeVms:
    return FakeVms()


@pytest.fixture
async def boxes(tmp_path: Path, vms: FakeVms) -> AsyncIterator[Boxes[FakeVm]]:
    async with open_boxes(make_host(tmp_path), vms) as made:
        yield made


async def end_of(operation: Operation) -> Event:
    return [event async for event in operation.events()][-1]


async def view_of(operation: Operation) -> BoxView:
    last = await end_of(operation)
    assert last.result is not None, last.error
    return BoxView.model_validate(last.result)


async def code_of(operation: Operation) -> str:
    last = await end_of(operation)
    assert last.error is not None
    return last.error.code


async def start(boxes: Boxes[FakeVm], box: str = BOX, **request: object) -> BoxView:
    return await view_of(boxes.start(box, StartBox.model_validate(request)))


async def test_a_started_box_is_ready_and_in_the_journal(boxes: Boxes[FakeVm], tmp_path: Path) -> None:
    view = await start(boxes, name="shop")
    assert (view.state, view.generation, view.name) == (BoxState.READY, 1, "shop")
    assert json.loads((tmp_path / "lib/node/journal" / f"{BOX}.json").read_text())["state"] == "ready"


async def test_starting_a_known_box_answers_with_it_as_it_is(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    first, second = await start(boxes), await start(boxes)
    assert (first.generation, second.generation) == (1, 1)
    assert vms.did.count(f"start {BOX}") == 1


async def test_two_starts_at_once_are_one(boxes: Boxes[FakeVm], vms: FakeVms) -> None:  # report 43
    operations = [boxes.start(BOX, StartBox()) for _ in range(5)]
    assert {(await view_of(operation)).id for operation in operations} == {BOX}
    assert vms.did.count(f"start {BOX}") == 1


async def test_a_start_that_fails_leaves_only_its_error(boxes: Boxes[FakeVm], vms: FakeVms, tmp_path: Path) -> None:
    vms.fail["start"] = VmError("QEMU does not start")
    assert await code_of(boxes.start(BOX, StartBox())) == "vm_failed"
    assert vms.did == [f"start {BOX}", f"destroy {BOX}"]
    assert boxes.views() == []
    assert list((tmp_path / "lib/node/journal").iterdir()) == []


async def test_a_failed_start_may_be_tried_again_under_the_same_id(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    vms.fail["start"] = VmError("not now")
    await code_of(boxes.start(BOX, StartBox()))
    vms.fail.clear()
    assert (await start(boxes)).state is BoxState.READY


async def test_an_id_that_is_none_is_refused_by_name(boxes: Boxes[FakeVm]) -> None:
    for bad in ("../etc/passwd", "AAAAAAAAAAAA", "short", "aaaaaaaaaaaaa"):
        with pytest.raises(BadRequest, match="box id"):
            boxes.start(bad, StartBox())


async def test_a_flavour_that_was_not_built_is_told_with_those_that_were(boxes: Boxes[FakeVm]) -> None:
    last = await end_of(boxes.start(BOX, StartBox(flavour="full")))
    assert last.error is not None
    assert (last.error.code, last.error.cause) == (ImageMissing.code, "flavours here: core")


async def test_freeze_leaves_no_process_and_thaw_brings_the_box_back(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    await start(boxes)
    frozen = await view_of(boxes.change(BOX, "freeze"))
    assert (frozen.state, frozen.pid, vms.running) == (BoxState.FROZEN, None, {})
    thawed = await view_of(boxes.change(BOX, "thaw"))
    assert (thawed.state, thawed.generation, thawed.cold) == (BoxState.READY, 2, False)


async def test_freezing_twice_is_freezing_once(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    await start(boxes)
    await view_of(boxes.change(BOX, "freeze"))
    assert (await view_of(boxes.change(BOX, "freeze"))).state is BoxState.FROZEN
    assert vms.did.count(f"freeze {BOX}") == 1


async def test_a_freeze_that_fails_lets_the_box_go_on(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    await start(boxes)
    vms.fail["freeze"] = VmError("no space")
    assert await code_of(boxes.change(BOX, "freeze")) == "vm_failed"
    assert boxes.get(BOX).view().state is BoxState.READY


async def test_twenty_freezes_and_thaws_in_a_row_all_work(boxes: Boxes[FakeVm]) -> None:  # report 21
    await start(boxes)
    for turn in range(20):
        assert (await view_of(boxes.change(BOX, "freeze"))).state is BoxState.FROZEN
        assert (await view_of(boxes.change(BOX, "thaw"))).generation == turn + 2


async def test_a_call_right_after_a_freeze_wakes_the_box(boxes: Boxes[FakeVm]) -> None:  # reports 22, 27
    await start(boxes)
    freezing = boxes.change(BOX, "freeze")
    calling = boxes.run(BOX, RunCommand(exec_id="e1", cmd="true"))
    assert (await end_of(freezing)).error is None
    last = await end_of(calling)
    assert last.error is None or last.error.code == "box_conflict"
    last = await end_of(boxes.run(BOX, RunCommand(exec_id="e2", cmd="true")))
    assert last.result is not None
    assert last.result["exitCode"] == 0


async def test_looking_at_a_frozen_box_does_not_wake_it(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    await start(boxes)
    await view_of(boxes.change(BOX, "freeze"))
    assert (await boxes.look(BOX)).state is BoxState.FROZEN
    boxes.get(BOX).console()
    assert f"thaw {BOX}" not in vms.did


async def test_a_snapshot_that_cannot_be_loaded_leads_to_a_cold_boot_that_says_so(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    await start(boxes)
    await view_of(boxes.change(BOX, "freeze"))
    vms.fail["thaw"] = VmError("another QEMU")
    view = await view_of(boxes.change(BOX, "thaw"))
    assert (view.state, view.cold) == (BoxState.READY, True)


async def test_archiving_a_frozen_box_writes_its_memory_to_disk_first(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    await start(boxes)
    await view_of(boxes.change(BOX, "freeze"))
    vms.did.clear()
    assert (await view_of(boxes.change(BOX, "archive"))).state is BoxState.ARCHIVED
    assert [step for step in vms.did if step.split()[0] in {"thaw", "drop"}] == [f"thaw {BOX}", f"drop {BOX}"]


async def test_an_archived_box_is_restored_by_any_call(boxes: Boxes[FakeVm]) -> None:
    await start(boxes)
    await view_of(boxes.change(BOX, "archive"))
    assert (await end_of(boxes.run(BOX, RunCommand(exec_id="e1", cmd="true")))).error is None
    assert boxes.get(BOX).view().cold


async def test_a_destroyed_box_is_not_found(boxes: Boxes[FakeVm], tmp_path: Path) -> None:
    await start(boxes)
    assert (await view_of(boxes.change(BOX, "destroy"))).state is BoxState.STOPPED
    with pytest.raises(BoxNotFound):
        boxes.get(BOX)
    assert list((tmp_path / "lib/node/journal").iterdir()) == []


async def test_a_box_whose_files_would_not_go_keeps_its_record(boxes: Boxes[FakeVm], vms: FakeVms, tmp_path: Path) -> None:  # report 50
    await start(boxes)
    vms.fail["destroy"] = NodeError("a link would not go")
    await code_of(boxes.change(BOX, "destroy"))
    assert len(list((tmp_path / "lib/node/journal").iterdir())) == 1


async def test_the_same_exec_id_is_one_command_and_waits_again(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    await start(boxes)
    first = boxes.run(BOX, RunCommand(exec_id="e1", cmd="hang"))
    second = boxes.run(BOX, RunCommand(exec_id="e1", cmd="hang"))
    await wait_all_tasks_blocked()
    vms.running[BOX].guest.end_commands()
    assert (await end_of(first)).result == (await end_of(second)).result


async def test_another_command_under_a_known_exec_id_is_refused_and_not_answered_with_the_old_result(boxes: Boxes[FakeVm]) -> None:
    await start(boxes)
    await end_of(boxes.run(BOX, RunCommand(exec_id="build-1", cmd="make")))
    assert await code_of(boxes.run(BOX, RunCommand(exec_id="build-1", cmd="make all"))) == "exec_id_taken"


async def test_a_call_cut_by_a_freeze_says_how_to_get_its_result(boxes: Boxes[FakeVm]) -> None:
    await start(boxes)
    calling = boxes.run(BOX, RunCommand(exec_id="e1", cmd="hang"))
    await wait_all_tasks_blocked()
    await view_of(boxes.change(BOX, "freeze"))
    last = await end_of(calling)
    assert last.error is not None
    assert (last.error.code, "execId" in last.error.remedy) == (BoxConflict.code, True)


async def test_a_wait_ends_at_its_time_with_the_command_still_running(boxes: Boxes[FakeVm], autojump_clock: MockClock) -> None:
    await start(boxes)
    await end_of(boxes.run(BOX, RunCommand(exec_id="e1", cmd="hang", background=True)))
    last = await end_of(boxes.wait(BOX, "e1", WaitCommand(wait_sec=45)))
    assert last.result is not None
    assert (last.result["ready"], last.result["why"]) == (False, "waited 45 s")


async def test_a_vm_that_ends_by_itself_leaves_a_box_that_boots_again(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    await start(boxes)
    vms.running[BOX].exited.set()
    await wait_all_tasks_blocked()
    view = boxes.get(BOX).view()
    assert view.state is BoxState.ARCHIVED
    assert view.problem is not None
    assert view.problem.code == "vm_ended"
    assert (await end_of(boxes.run(BOX, RunCommand(exec_id="e1", cmd="true")))).error is None


async def test_a_box_that_does_not_fit_is_refused_with_figures(tmp_path: Path, vms: FakeVms) -> None:
    async with open_boxes(make_host(tmp_path, memory_total=GIB + OVERHEAD), vms) as boxes:
        await start(boxes)
        last = await end_of(boxes.start(OTHER, StartBox()))
        assert last.error is not None
        assert (last.error.code, "memory" in last.error.message, BOX in last.error.cause) == ("no_capacity", True, True)  # report 71


async def test_a_frozen_box_holds_no_memory(tmp_path: Path, vms: FakeVms) -> None:
    async with open_boxes(make_host(tmp_path, memory_total=GIB + OVERHEAD), vms) as boxes:
        await start(boxes)
        await view_of(boxes.change(BOX, "freeze"))
        assert (await start(boxes, OTHER)).state is BoxState.READY
        assert await code_of(boxes.change(BOX, "thaw")) == "no_capacity"
        assert boxes.get(BOX).state is BoxState.FROZEN


async def test_an_idle_box_freezes_by_itself_with_nobody_else_there(tmp_path: Path, vms: FakeVms) -> None:  # report 64
    async with open_boxes(make_host(tmp_path, clocks=Clocks(freeze_after=0.0)), vms) as boxes, trio.open_nursery() as nursery:
        await start(boxes)
        nursery.start_soon(boxes.keep_clocks)
        with trio.fail_after(5):
            while boxes.get(BOX).state is not BoxState.FROZEN:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_a_freeze_is_put_on_disk_soon_after(boxes: Boxes[FakeVm], vms: FakeVms, autojump_clock: MockClock) -> None:
    await start(boxes)
    await view_of(boxes.change(BOX, "freeze"))
    await trio.sleep(2 * FLUSH_AFTER)
    assert vms.did[-2:] == [f"flush {BOX}", f"durable {BOX}"]


async def test_a_thaw_does_not_wait_for_the_disk(boxes: Boxes[FakeVm], vms: FakeVms, autojump_clock: MockClock) -> None:
    vms.gates["flush"] = trio.Event()
    await start(boxes)
    await view_of(boxes.change(BOX, "freeze"))
    await trio.sleep(2 * FLUSH_AFTER)
    assert (await view_of(boxes.change(BOX, "thaw"))).state is BoxState.READY
    vms.gates["flush"].set()
    await trio.sleep(1)
    assert f"flush {BOX}" in vms.did
    assert f"durable {BOX}" not in vms.did


async def test_a_box_with_a_running_command_is_not_frozen_when_idle(tmp_path: Path, vms: FakeVms) -> None:  # report 29
    async with open_boxes(make_host(tmp_path, clocks=Clocks(freeze_after=0.0)), vms) as boxes:
        await start(boxes)
        await end_of(boxes.run(BOX, RunCommand(exec_id="e1", cmd="server", background=True)))
        assert await boxes.get(BOX).due_for_sure() is None
        vms.running[BOX].guest.end_commands()
        assert boxes.get(BOX).due(0) is None or await boxes.get(BOX).due_for_sure() == "freeze"


async def test_a_restarted_daemon_takes_back_what_runs_and_undoes_what_was_half_made(tmp_path: Path, vms: FakeVms) -> None:
    host = make_host(tmp_path)
    async with open_boxes(host, vms) as boxes:
        await start(boxes)
        vms.gates["start"] = trio.Event()
        boxes.start(OTHER, StartBox())
        await wait_all_tasks_blocked()
        journal = tmp_path / "lib/node/journal" / f"{OTHER}.json"
        half_made = journal.read_text()
        vms.gates.pop("start").set()
    journal.write_text(half_made)
    async with open_boxes(host, vms) as boxes:
        await boxes.recover()
        assert [view.id for view in boxes.views()] == [BOX]
        assert boxes.get(BOX).state is BoxState.READY


async def test_a_box_whose_vm_died_with_the_daemon_comes_back_cold(tmp_path: Path, vms: FakeVms) -> None:
    host = make_host(tmp_path)
    async with open_boxes(host, vms) as boxes:
        await start(boxes)
    vms.running.clear()
    async with open_boxes(host, vms) as boxes:
        await boxes.recover()
        view = boxes.get(BOX).view()
        assert (view.state, view.cold) == (BoxState.ARCHIVED, True)


async def test_a_stopping_daemon_freezes_what_runs(boxes: Boxes[FakeVm], vms: FakeVms) -> None:
    await start(boxes)
    await start(boxes, OTHER)
    await boxes.rest()
    assert {view.state for view in boxes.views()} == {BoxState.FROZEN}
    assert {f"durable {BOX}", f"durable {OTHER}"} <= set(vms.did)  # a reboot of the host may follow
