"""Starts: a box is recorded before anything is done, so that a list shows it at once; then placed, then started on its node.

The same (conversation, name, goal) is one start, however often it is asked for (CONTRACT 2.1). What a stopped coordinator left unfinished
is taken up again: the node joins the same start, or a claimed box is placed anew.
"""

from __future__ import annotations

import logging
import secrets
import string
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import trio

from coordinator.clock import Clock
from coordinator.config import CoordinatorConfig
from coordinator.errors import NoCapacity, as_problem
from coordinator.fleet import Fleet
from coordinator.metrics import Metrics
from coordinator.node_client import Progress
from coordinator.placement import after_failure, choose_flavour, place
from coordinator.store import boxes as table
from coordinator.store.boxes import BoxRecord
from coordinator.store.database import Database
from coordinator.work import Work
from node.protocol import BoxView, Hop, StartBox
from tools.context import Caller, ToolError

log = logging.getLogger("boxfleet.starts")

NEVER_PLACED = frozenset({"no_capacity", "image_missing"})
CLEAN_UP = 30.0  # s for removing what a failed start left on its node


@dataclass(frozen=True)
class Order:
    """What was asked for; names already cut."""

    name: str
    goal: str
    size: int
    flavour: str | None
    wait: float  # s for capacity


@dataclass(frozen=True)
class Started:
    record: BoxRecord
    reused: bool


def new_box_id() -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(12))


class Starts:
    def __init__(
        self, config: CoordinatorConfig, database: Database, fleet: Fleet, metrics: Metrics, nursery: trio.Nursery, clock: Clock
    ) -> None:
        self._config, self._database, self._fleet, self._metrics = config, database, fleet, metrics
        self._nursery, self._clock = nursery, clock
        self._same: dict[tuple[str, ...], Work[Started]] = {}
        self._by_box: dict[str, Work[Started]] = {}

    async def start(self, caller: Caller, order: Order, progress: Progress) -> Started:
        """Begins the start, or joins the same one; returns when the box is ready. Raises NoCapacity, ImageMissing or what the node said."""
        same = caller.account, caller.conversation, order.name, order.goal
        joined = self._same.get(same)
        if joined is None:
            self._same[same] = work = Work[Started]()
            self._nursery.start_soon(self._begin, same, caller, order, work)
            return await work.wait(progress)
        return replace(await joined.wait(progress), reused=True)

    async def wait(self, box: str, progress: Progress) -> None:
        """Waits for a start that is under way; returns at once when there is none."""
        if work := self._by_box.get(box):
            await work.wait(progress)

    async def recover(self) -> None:
        """Takes up what a stopped coordinator left unfinished."""
        for record in await self._database.run(table.unfinished):
            log.info("taking up the start of box %s", record.id)
            self._by_box[record.id] = Work()
            self._nursery.start_soon(self._take_up, record)

    async def _take_up(self, record: BoxRecord) -> None:
        try:
            await self._by_box[record.id].run(partial(self._finish, record, 0.0))
        finally:
            del self._by_box[record.id]

    async def _begin(self, same: tuple[str, ...], caller: Caller, order: Order, work: Work[Started]) -> None:
        try:
            await work.run(partial(self._first, caller, order, work))
        finally:
            del self._same[same]

    async def _first(self, caller: Caller, order: Order, work: Work[Started], progress: Progress) -> Started:
        now = self._clock()
        since = now - self._config.repeat_start
        mine = {"account": caller.account, "conversation": caller.conversation, "name": order.name, "goal": order.goal}
        earlier = await self._database.run(partial(table.same_start, since=since), **mine)
        if earlier:
            await self.wait(earlier.id, progress)
            return Started(await self._database.run(table.get, earlier.id), reused=True)
        box = new_box_id()
        self._by_box[box] = work
        try:
            flavour = order.flavour or self._config.default_flavour
            claim = partial(table.claim, box=box, client=caller.client, flavour=flavour, size=order.size, now=now)
            return await self._finish(await self._database.run(claim, **mine), order.wait, progress)
        finally:
            del self._by_box[box]

    async def _finish(self, record: BoxRecord, wait: float, progress: Progress) -> Started:
        """From a claimed or starting record to a live box, or to a failed record."""
        try:
            with self._metrics.timed("start"):
                node, view = await self._somewhere(record, wait, progress)
        except ToolError as error:
            if error.code in NEVER_PLACED:  # a refusal, not a box: asking again must not leave a row each time
                await self._database.run(table.remove, record.id)
                raise
            problem = as_problem(error).model_dump_json()
            await self._database.run(table.change, record.id, stage="failed", stage_at=self._clock(), problem=problem)
            raise
        self._fleet.noticed(node, view)
        now, state = self._clock(), view.state.value
        return Started(await self._database.run(table.change, record.id, stage="live", stage_at=now, node_state=state), reused=False)

    async def _somewhere(self, record: BoxRecord, wait: float, progress: Progress) -> tuple[str, BoxView]:
        """Tries nodes by the three-way rule of report 69 until one has the box."""
        deadline = trio.current_time() + min(wait, self._config.max_capacity_wait)
        await self._fleet.settled()
        if record.node:
            with suppress(ToolError):
                return record.node, await self._on_node(record, record.node, progress)
        record = await self._with_flavour(record)
        failed: dict[str, ToolError] = {}
        full: set[str] = set()
        looked_again = False
        while True:
            try:
                node = await self._reserve(record, {*failed, *full})
            except NoCapacity:
                if failed and not full:
                    raise list(failed.values())[-1] from None
                if not looked_again:  # a heartbeat may be 5 s old: what was deleted since must not be a false "no room"
                    looked_again = True
                    await self._fleet.look_again()
                    continue
                if trio.current_time() >= deadline:
                    raise
                progress("waiting for room", None)
                with trio.move_on_at(deadline):
                    await self._fleet.change()
                full.clear()
                continue
            try:
                return node, await self._on_node(record, node, progress)
            except ToolError as error:
                log.warning("box %s did not start on %s: %s: %s", record.id, node, error.code, error.message)
                await self._withdraw(record, node)
                match after_failure(error.code, Hop(error.hop)):
                    case "give_up":
                        raise
                    case "another_node":
                        full.add(node)
                    case "exclude_node":
                        failed[node] = error

    async def _with_flavour(self, record: BoxRecord) -> BoxRecord:
        if record.flavour:
            return record
        flavour = choose_flavour(self._fleet.candidates(), asked=None, default="", development=self._config.development)
        return await self._database.run(table.change, record.id, flavour=flavour)

    async def _reserve(self, record: BoxRecord, excluded: Collection[str]) -> str:
        """Chooses a node and promises its room to the box, in one transaction."""
        candidates, now = self._fleet.candidates(), self._clock()

        def decide(promises: list[tuple[str, str, int]]) -> str:
            counted = [candidate.promising(promises) for candidate in candidates]
            development = self._config.development
            return place(counted, flavour=record.flavour, size=record.size, excluded=excluded, development=development)

        return await self._database.run(table.reserve, record.id, decide, since=self._fleet.viewed_at(), now=now)

    async def _on_node(self, record: BoxRecord, node: str, progress: Progress) -> BoxView:
        spec = StartBox(flavour=record.flavour, size=record.size, name=record.name)  # type: ignore[arg-type]
        return await self._fleet.client(node).start(record.id, spec, progress)

    async def _withdraw(self, record: BoxRecord, node: str) -> None:
        """Takes the promise back, and removes what may be left of the box on the node."""
        with trio.move_on_after(CLEAN_UP), suppress(ToolError):
            await self._fleet.client(node).destroy(record.id)
        self._fleet.forget(node, record.id)
        await self._database.run(table.change, record.id, node=None, stage="claimed", stage_at=self._clock())
