"""Operations: work that goes on whoever waits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from node.errors import BoxNotFound
from node.operations import Operation, Operations, Report
from node.protocol import Event, StartBox, Wire

DONE = StartBox(name="done")


async def collect(operation: Operation) -> list[Event]:
    return [event async for event in operation.events()]


def ignore(text: str) -> None:
    pass


async def test_a_watcher_sees_progress_and_then_the_result(nursery: trio.Nursery) -> None:
    go = trio.Event()

    async def work(report: Report) -> Wire:
        report("copying", 0.5)
        await go.wait()
        return DONE

    operation = Operations(nursery, ignore).join("a", work)
    seen = []
    async for event in operation.events():
        seen.append(event)
        if event.message == "copying":
            go.set()
    assert [event.type for event in seen if event.type != "alive"] == ["progress", "result"]
    assert seen[-1].result == DONE.wire()


async def test_the_same_request_joins_the_work_under_way(nursery: trio.Nursery) -> None:
    runs, go = [], trio.Event()

    async def work(report: Report) -> Wire:
        runs.append(1)
        await go.wait()
        return DONE

    operations = Operations(nursery, ignore)
    first, second = operations.join("a", work), operations.join("a", work)
    go.set()
    assert (await collect(first))[-1] == (await collect(second))[-1]
    assert len(runs) == 1


async def test_a_watcher_that_goes_away_does_not_stop_the_work(nursery: trio.Nursery) -> None:
    go, ended = trio.Event(), trio.Event()

    async def work(report: Report) -> Wire:
        await go.wait()
        ended.set()
        return DONE

    operation = Operations(nursery, ignore).join("a", work)
    async with trio.open_nursery() as watchers:
        watchers.start_soon(collect, operation)
        await trio.testing.wait_all_tasks_blocked()
        watchers.cancel_scope.cancel()
    go.set()
    await ended.wait()


@pytest.mark.parametrize(("error", "code"), [(BoxNotFound("no box"), "box_not_found"), (RuntimeError("inner secret"), "node_defect")])
async def test_every_failure_is_told_as_a_typed_error_without_inner_text(error: Exception, code: str, nursery: trio.Nursery) -> None:
    async def work(report: Report) -> Wire:
        raise error

    last = (await collect(Operations(nursery, ignore).join("a", work)))[-1]
    assert last.error is not None
    assert last.error.code == code
    assert "secret" not in last.model_dump_json()


async def test_a_line_comes_at_least_every_five_seconds(nursery: trio.Nursery, autojump_clock: MockClock) -> None:  # report 13
    async def work(report: Report) -> Wire:
        await trio.sleep(60)
        return DONE

    times: list[float] = []
    async for _ in Operations(nursery, ignore).join("a", work).events():
        times.append(trio.current_time())
    assert max(b - a for a, b in pairwise(times)) <= 5.001


async def test_cancelled_work_tells_its_watchers_that_the_node_stops() -> None:
    operation: Operation | None = None

    async def work(report: Report) -> Wire:
        await trio.sleep_forever()
        raise AssertionError

    async with trio.open_nursery() as nursery:
        operation = Operations(nursery, ignore).join("a", work)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    last = (await collect(operation))[-1]
    assert last.error is not None
    assert last.error.code == "node_stopping"


