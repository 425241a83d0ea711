"""Boxes for those who call: every method looks the box up in the caller's account first, so an id is a name and not a capability."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Literal

import trio
from pydantic import ValidationError

from coordinator import views
from coordinator.clock import Clock
from coordinator.config import CoordinatorConfig
from coordinator.conversations import Conversations
from coordinator.errors import BadInput, BoxGone, BoxNotFound, CommandNotFound, NodeProblem
from coordinator.fleet import Fleet
from coordinator.links import OutputLinks, Stream
from coordinator.metrics import Metrics
from coordinator.node_client import Node, Progress, unheard
from coordinator.starts import Order, Starts
from coordinator.stops import Stops
from coordinator.store import boxes as table
from coordinator.store import steps as steps_table
from coordinator.store.boxes import BoxRecord
from coordinator.store.database import Database
from node.protocol import BoxState, CommandView, Problem, RunCommand, WaitCommand
from tools.context import Caller, ToolError

FAILED_SHOWN = 3600.0  # s that a failed start stays in lists
RESTORED = "The box was archived and was booted again from its disk for this call: processes of before are gone. Archive it when done."
LIVE_LOOK = 3.0  # s for the node to answer a status; then the last heartbeat's word is told
EXEC_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
LONGEST = 3600.0  # s that a call waits for a command (boxd's FOREGROUND_LIMIT)


class BoxService:
    """What all callers share."""

    def __init__(
        self,
        config: CoordinatorConfig,
        database: Database,
        fleet: Fleet,
        conversations: Conversations,
        links: OutputLinks,
        metrics: Metrics,
        nursery: trio.Nursery,
        clock: Clock,
    ) -> None:
        self.config, self.database, self.fleet, self.conversations = config, database, fleet, conversations
        self.links, self.metrics, self.clock = links, metrics, clock
        self.starts = Starts(config, database, fleet, metrics, nursery, clock)
        self.stops = Stops(config, database, fleet, metrics, nursery, clock)

    def for_caller(self, caller: Caller, progress: Progress = unheard) -> CallerBoxes:
        """The caller's boxes (tools.context.Boxes); `progress` hears of what takes its time."""
        return CallerBoxes(self, caller, progress)

    async def recover(self) -> None:
        await self.starts.recover()

    async def own(self, caller: Caller, box: str) -> BoxRecord:
        """The caller's box of that id. Raises BoxNotFound, also for a box of another account."""
        record = await self.database.run(table.find, caller.account, box)
        if record is None:
            raise BoxNotFound(f"There is no box {box[:64]!r}")
        return record

    async def every(self) -> list[dict[str, Any]]:
        """All accounts' boxes, for the operator."""
        records = await self._records(None)
        return [self.told(record, None) | {"account": record.account, "node": record.node} for record in records]

    async def of(self, caller: Caller) -> list[dict[str, Any]]:
        return [self.told(record, caller) for record in await self._records(caller.account)]

    @asynccontextmanager
    async def output(self, box: str, exec_id: str, stream: Stream) -> AsyncIterator[AsyncIterator[bytes]]:
        """A command's whole output, for the holder of a signed link."""
        try:
            record = await self.database.run(table.get, box)
        except KeyError as error:
            raise BoxNotFound(f"There is no box {box[:64]!r}") from error
        with gone_boxes(record):
            async with self.fleet.client(record.node).output(box, exec_id, stream, 0) as chunks:
                yield chunks

    def shown(self, record: BoxRecord) -> views.Shown:
        return views.show(record, self.fleet.whereabouts(record.node, record.id), grace=self.config.node_grace)

    def told(self, record: BoxRecord, caller: Caller | None) -> dict[str, Any]:
        return views.box_json(record, self.shown(record), self.agent(record, caller))

    def agent(self, record: BoxRecord, caller: Caller | None) -> dict[str, Any]:
        """Who holds the box: the conversation that used it last."""
        return {
            "state": self.conversations.state(record.account, record.conversation),
            "thisConversation": caller is not None and record.conversation == caller.conversation,
            "client": record.client,
        }

    async def _records(self, account: str | None) -> list[BoxRecord]:
        return await self.database.run(table.of_account, account, failed_since=self.clock() - FAILED_SHOWN)


class CallerBoxes:
    """tools.context.Boxes for one caller, and the few verbs more that REST has."""

    def __init__(self, service: BoxService, caller: Caller, progress: Progress) -> None:
        self._service, self._caller, self._progress = service, caller, progress
        self._run = service.database.run

    async def start(
        self, *, name: str, goal: str, size: int, flavour: str | None, wait_for_capacity_sec: float, restore: str | None
    ) -> dict[str, Any]:
        name, goal = views.cut(name, views.NAME), views.cut(goal, views.GOAL)
        if not goal and not restore:
            raise BadInput("goal is required")
        if size not in {1, 2, 4}:
            raise BadInput("size must be 1, 2 or 4")
        if restore:
            return await self._restore(restore, name, goal)
        order = Order(name or goal[: views.NAME].strip(), goal, size, flavour, wait_for_capacity_sec)
        started = await self._service.starts.start(self._caller, order, self._progress)
        told = self._service.told(started.record, self._caller)
        return told | {"reused": True} if started.reused else told

    async def list(self) -> list[dict[str, Any]]:
        return await self._service.of(self._caller)

    async def status(self, box: str) -> dict[str, Any]:
        record = await self._service.own(self._caller, box)
        shown = self._service.shown(record)
        if shown.status != BoxState.UNREACHABLE and record.stage == "live":
            shown = await self._live(record, shown)
        steps = await self._run(steps_table.of_box, box)
        return views.status_json(record, shown, self._service.agent(record, self._caller), steps)

    async def exec(
        self,
        box: str,
        *,
        cmd: str,
        note: str,
        cwd: str,
        user: str,
        env: Mapping[str, str],
        timeout_sec: float | None,
        background: bool,
        exec_id: str | None,
    ) -> dict[str, Any]:
        exec_id = exec_id or secrets.token_hex(8)
        command = _checked(
            RunCommand, exec_id=exec_id, cmd=cmd, cwd=cwd, user=user, env=dict(env), timeout_sec=timeout_sec, background=background,
            wait_sec=LONGEST,
        )  # fmt: skip
        record, node = await self._reach(box)
        archived = self._service.shown(record).status == BoxState.ARCHIVED
        await self._used(record, cmd=cmd, dir=cwd, note=views.cut(note, views.NOTE), exec_id=exec_id)
        try:
            with self._service.metrics.timed("exec"), gone_boxes(record):
                view = await node.exec(box, command, self._progress)
        except ToolError as error:
            await self._run(steps_table.finish, box, exec_id, error=error.message)
            raise
        await self._answered(record, view)
        if background:
            log = view.stdout.path if view.stdout else None
            told = {"bgId": exec_id, "execId": exec_id, "pid": view.pid, "running": view.running, "log": log}
        else:
            told = {"execId": exec_id, **views.ending_json(view), **self._urls(box, view)}
            told |= {"running": True} if view.running else {}
        return told | ({"restored": RESTORED} if archived else {})

    async def commands(self, box: str) -> Sequence[dict[str, Any]]:
        record, node = await self._reach(box)
        with gone_boxes(record):
            commands = await node.commands(box)
        steps = await self._run(steps_table.of_box, box)
        mine = {step.exec_id for step in steps if step.conversation == self._caller.conversation}
        return [views.command_json(command) | {"mine": command.exec_id in mine} for command in commands]

    async def wait_command(
        self, box: str, exec_id: str, *, wait_sec: float, until: Literal["exited", "ready"], ready_port: int | None, ready_log: str | None
    ) -> dict[str, Any]:
        wait = _checked(WaitCommand, wait_sec=wait_sec, until=until, ready_port=ready_port, ready_log=ready_log)
        record, node = await self._reach(box)
        with gone_boxes(record), unknown_commands(exec_id):
            waited = await node.wait(box, exec_id, wait, self._progress)
        told: dict[str, Any] = {"ready": waited.ready, "why": waited.why}
        if waited.command:
            await self._answered(record, waited.command)
            told |= views.command_json(waited.command) | self._urls(box, waited.command)
        return told

    async def stop_command(self, box: str, exec_id: str) -> dict[str, Any]:
        record, node = await self._reach(box)
        with gone_boxes(record), unknown_commands(exec_id):
            view = await node.stop_command(box, exec_id)
        await self._answered(record, view)
        return views.command_json(view) | self._urls(box, view)

    async def say(self, box: str, text: str) -> dict[str, Any]:
        record, now = await self._service.own(self._caller, box), self._service.clock()
        await self._run(table.change, record.id, said=views.cut(text, views.GOAL), said_at=now)
        return {"ok": True, "id": record.id}

    async def stop(self, box: str, *, delete: bool) -> dict[str, Any]:
        record = await self._settled(box)
        if record.stage == "stopped" and not record.stop_answer:
            raise BoxGone(f"Box {box} was deleted when its time in the archive was over")
        delete = delete or record.stage == "failed"  # nothing of it is left to archive
        with gone_boxes(record):
            return await self._service.stops.stop(record, delete=delete, progress=self._progress)

    async def freeze(self, box: str) -> dict[str, Any]:
        return await self._act(box, "freeze")

    async def thaw(self, box: str) -> dict[str, Any]:
        return await self._act(box, "thaw")

    async def _act(self, box: str, action: Literal["freeze", "thaw"]) -> dict[str, Any]:
        record, node = await self._reach(box)
        with self._service.metrics.timed(action), gone_boxes(record):
            self._service.fleet.noticed(record.node or "", await node.act(box, action, self._progress))
        return self._service.told(record, self._caller)

    async def _restore(self, box: str, name: str, goal: str) -> dict[str, Any]:
        """An archived or frozen box comes back; a ready one is just handed over. The caller holds it from now on."""
        record, node = await self._reach(box)
        with gone_boxes(record):
            view = await node.box(box)
            if view.state == BoxState.ARCHIVED:
                with self._service.metrics.timed("restore"):
                    view = await node.act(box, "restore", self._progress)
            elif view.state == BoxState.FROZEN:
                with self._service.metrics.timed("thaw"):
                    view = await node.act(box, "thaw", self._progress)
        self._service.fleet.noticed(record.node or "", view)
        changes = {"name": name or record.name, "goal": goal or record.goal, "node_state": view.state.value}
        held = {"conversation": self._caller.conversation, "client": self._caller.client, "stop_at": None}
        record = await self._run(table.change, box, **changes, **held)
        return self._service.told(record, self._caller) | {"restored": True}

    async def _settled(self, box: str) -> BoxRecord:
        """The caller's box, once its start is over (a start that fails is told by the record)."""
        record = await self._service.own(self._caller, box)
        if record.stage in {"claimed", "starting"}:
            with suppress(ToolError):
                await self._service.starts.wait(box, self._progress)
            record = await self._service.own(self._caller, box)
        return record

    async def _reach(self, box: str) -> tuple[BoxRecord, Node]:
        """The caller's box and its node, as far as they can be used. Raises at once what stands in the way."""
        record = await self._settled(box)
        if record.stage == "failed":
            raise _failure(record)
        if record.stage == "stopped":
            raise BoxGone(f"Box {box} was deleted")
        return record, self._service.fleet.client(record.node)

    async def _live(self, record: BoxRecord, shown: views.Shown) -> views.Shown:
        """What the node says this moment; the last heartbeat's word if it is slow."""
        with trio.move_on_after(LIVE_LOOK):
            try:
                view = await self._service.fleet.client(record.node).box(record.id)
            except ToolError:
                return shown
            self._service.fleet.noticed(record.node or "", view)
            return views.Shown(view.state, view, view.problem)
        return shown

    async def _used(self, record: BoxRecord, *, cmd: str, dir: str, note: str, exec_id: str) -> None:
        """The caller holds the box now, and what it does is a step."""
        changes: dict[str, Any] = {"conversation": self._caller.conversation, "client": self._caller.client, "stop_at": None}
        at, conversation = self._service.clock(), self._caller.conversation
        step = partial(
            steps_table.add, at=at, conversation=conversation, tool="sandbox_exec", cmd=cmd, dir=dir, note=note, exec_id=exec_id
        )

        def write(connection: Any) -> None:
            table.change(connection, record.id, **changes)
            if not views.is_internal(cmd):
                step(connection, record.id)

        await self._run(write)

    async def _answered(self, record: BoxRecord, view: CommandView) -> None:
        """The box runs, and perhaps a step has ended."""
        self._service.fleet.awake(record.node or "", record.id)
        if not view.running:
            finish = partial(steps_table.finish, exit_code=view.exit_code, signal=view.signal, timed_out=view.timed_out)
            await self._run(finish, record.id, view.exec_id)

    def _urls(self, box: str, view: CommandView) -> dict[str, str]:
        """Links to the whole output; stderr's only where the answer does not hold all of it."""
        if view.stdout is None:
            return {}
        urls = {"outputUrl": self._service.links.url(box, view.exec_id, "stdout")}
        if view.stderr and view.stderr.truncated:
            urls["stderrUrl"] = self._service.links.url(box, view.exec_id, "stderr")
        return urls


def _checked(model: Any, **values: Any) -> Any:
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _failure(record: BoxRecord) -> NodeProblem:
    return NodeProblem(Problem.model_validate_json(record.problem or '{"code": "start_failed", "message": "The box did not start"}'))


@contextmanager
def gone_boxes(record: BoxRecord) -> Iterator[None]:
    """A node that does not know one of our boxes has lost it; that is said, never covered by an empty box (report 68)."""
    try:
        yield
    except NodeProblem as problem:
        if problem.code != "box_not_found":
            raise
        raise BoxGone(f"Node {record.node} no longer has box {record.id}") from problem


@contextmanager
def unknown_commands(exec_id: str) -> Iterator[None]:
    """What is no execId at all must not reach a node: it would become part of a path there."""
    if not EXEC_ID.fullmatch(exec_id):
        raise CommandNotFound(f"bgId not found: {exec_id[:64]!r}")
    try:
        yield
    except NodeProblem as problem:
        if problem.code != "command_not_found":
            raise
        raise CommandNotFound(f"bgId not found: {exec_id[:64]}") from problem
