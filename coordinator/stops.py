"""Stops: a box is archived, or deleted when that is asked for in so many words. A repeated stop gets the first answer."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import trio

from coordinator.clock import Clock, iso
from coordinator.config import CoordinatorConfig
from coordinator.fleet import Fleet
from coordinator.metrics import Metrics
from coordinator.node_client import Node, Progress
from coordinator.store import boxes as table
from coordinator.store.boxes import BoxRecord
from coordinator.store.database import Database
from coordinator.work import Work
from node.protocol import BoxState
from tools.context import ToolError

LOOK = 20.0  # s for the look at what a delete would lose


class Stops:
    def __init__(
        self, config: CoordinatorConfig, database: Database, fleet: Fleet, metrics: Metrics, nursery: trio.Nursery, clock: Clock
    ) -> None:
        self._config, self._database, self._fleet, self._metrics = config, database, fleet, metrics
        self._nursery, self._clock = nursery, clock
        self._under_way: dict[tuple[str, bool], Work[dict[str, Any]]] = {}

    async def stop(self, record: BoxRecord, *, delete: bool, progress: Progress) -> dict[str, Any]:
        """{id, status, unsavedWork, ...}: begins the stop, joins the same one, or gives the answer of one within `repeat_stop`."""
        answered = record.stop_answer and record.stop_delete == delete
        if answered and record.stop_at and self._clock() - record.stop_at < self._config.repeat_stop:
            first: dict[str, Any] = json.loads(record.stop_answer or "")
            return first
        key = record.id, delete
        if key not in self._under_way:
            self._under_way[key] = Work()
            self._nursery.start_soon(self._run, key, record)
        return await self._under_way[key].wait(progress)

    async def _run(self, key: tuple[str, bool], record: BoxRecord) -> None:
        try:
            await self._under_way[key].run(partial(self._stop, record, key[1]))
        finally:
            del self._under_way[key]

    async def _stop(self, record: BoxRecord, delete: bool, progress: Progress) -> dict[str, Any]:
        with self._metrics.timed("stop"):
            answer = await (self._delete(record, progress) if delete else self._archive(record, progress))
        now = self._clock()
        changes: dict[str, Any] = {"stop_answer": json.dumps(answer), "stop_delete": delete, "stop_at": now}
        if delete:
            changes |= {"stage": "stopped", "stage_at": now}
        await self._database.run(table.change, record.id, **changes)
        return answer

    async def _archive(self, record: BoxRecord, progress: Progress) -> dict[str, Any]:
        node = self._fleet.client(record.node)
        unsaved = await self._unsaved(node, record.id, progress)
        view = await node.act(record.id, "archive", progress)
        self._fleet.noticed(record.node or "", view)
        return {
            "id": record.id,
            "status": view.state.value,
            "unsavedWork": unsaved,
            "deletesAt": None if view.deletes_at is None else iso(view.deletes_at),
            "restore": f'sandbox_start {{"restore": "{record.id}"}} brings it back with its /work',
        }

    async def _delete(self, record: BoxRecord, progress: Progress) -> dict[str, Any]:
        unsaved = None
        if self._fleet.whereabouts(record.node, record.id):  # else it was never placed, or its node was removed: there is nothing to ask
            node = self._fleet.client(record.node)
            if record.stage == "live":
                unsaved = await self._unsaved(node, record.id, progress)
            try:
                await node.destroy(record.id, progress)
            except ToolError as error:
                if error.code != "box_not_found":  # gone already, which is what was asked for
                    raise
            self._fleet.forget(record.node, record.id)
        return {"id": record.id, "status": BoxState.STOPPED.value, "unsavedWork": unsaved}

    async def _unsaved(self, node: Node, box: str, progress: Progress) -> dict[str, Any] | None:
        """Work in git that was not committed or pushed; None for a box that cannot be asked without restoring it. A look that fails is told
        and stops nothing: the box may be stopped because it is broken."""
        progress("looking for unsaved work", None)
        with trio.move_on_after(LOOK):
            try:
                if (await node.box(box)).state not in {BoxState.READY, BoxState.FROZEN}:
                    return None
                return (await node.unsaved(box)).wire()
            except ToolError as error:
                return {"unknown": error.message}
        return {"unknown": f"the box did not answer within {LOOK:.0f} s"}
