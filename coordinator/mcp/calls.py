"""Tool calls at work. A call runs in the coordinator's nursery, not in the request that asked for it: whoever asked only waits, and a
closed connection or a cancel ends that wait, never the work (CONTRACT 0.12).

    Calls.start -> Call        its events (progress, at last the answer) can be followed by any number of streams, from any point
    Calls.keep                 from now on the answer goes to the database: somebody holds an event id of it
    Calls.resume               the same call for a client that came back, also after a restart of the coordinator
"""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol

import trio

from coordinator.mcp import surface
from coordinator.mcp.messages import Request, RequestId, encode
from coordinator.store import calls as store
from coordinator.store.calls import CallRecord
from coordinator.store.database import Database
from tools.arguments import parse
from tools.context import Caller, Context, ToolError
from tools.table import BY_NAME
from tools.tool import Result, Tool

log = logging.getLogger(__name__)

CALL_LIMIT: Final = 65 * 60.0  # s; clients give up then (CONTRACT 2.1)
MAX_RUNNING: Final = 1000
MAX_PROGRESS: Final = 100  # events kept of a running call
KEEP_AGE: Final = 24 * 3600.0  # s
KEEP_COUNT: Final = 5000
PRUNE_EVERY: Final = 100  # kept calls

Tell = Callable[[str, float | None], None]


class OpenContext(Protocol):
    def __call__(self, caller: Caller, progress: Tell) -> AbstractAsyncContextManager[Context]:
        """What a tool may do for this caller, while the call runs."""


class Observe(Protocol):
    def __call__(self, tool: str, outcome: str, seconds: float) -> None:
        """`outcome` is "ok" or an error's code."""


@dataclass(frozen=True)
class Origin:
    """Where a call came from; only from there can it be followed, resumed or cancelled."""

    account: str
    session: str


@dataclass(frozen=True)
class Event:
    seq: int
    data: bytes  # a JSON-RPC message


class Call:
    """One tools/call. `events` holds the newest progress and, once `done`, the answer as the last one."""

    def __init__(self, request: RequestId, origin: Origin, tool: str, *, token: RequestId | None, modern: bool, name: str = "") -> None:
        self.id = name or secrets.token_hex(16)
        self.request, self.origin, self.tool, self.token, self.modern = request, origin, tool, token, modern
        self.events: deque[Event] = deque(maxlen=MAX_PROGRESS)
        self.done = False
        self.given_up = False  # the client cancelled; streams end, the work does not
        self.kept = False
        self.seq = 0
        self.began = trio.current_time()
        self._progress = 0.0
        self._changed = trio.Event()

    def after(self, seq: int) -> list[Event]:
        return [event for event in self.events if event.seq > seq]

    async def change(self) -> None:
        """Returns at the next event, or when the client gives up."""
        await self._changed.wait()

    async def end(self) -> None:
        while not (self.done or self.given_up):
            await self._changed.wait()

    def tell(self, message: str, fraction: float | None = None) -> None:
        """Progress, for a client that asked for it: seconds so far, and of how many in all where a fraction is known. Never falls back."""
        if self.token is None or self.done:
            return
        self._progress = max(self._progress + 0.001, round(trio.current_time() - self.began, 3))
        params: dict[str, Any] = {"progressToken": self.token, "progress": self._progress, "message": message}
        if fraction:
            params["total"] = round(self._progress / fraction, 3)
        self._publish(encode({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}))

    def answer(self, data: bytes) -> None:
        self.done = True
        self._publish(data)

    def give_up(self) -> None:
        self.given_up = True
        self._wake()

    def _publish(self, data: bytes) -> None:
        self.seq += 1
        self.events.append(Event(self.seq, data))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class Calls:
    """Every running call. `nursery` outlives requests; `open_context` gives a tool its services; `tools` maps names to tools."""

    def __init__(
        self,
        nursery: trio.Nursery,
        database: Database,
        open_context: OpenContext,
        *,
        clock: Callable[[], float],
        observe: Observe | None = None,
        tools: Mapping[str, Tool[Any]] = BY_NAME,
    ) -> None:
        self._nursery, self._database, self._open_context = nursery, database, open_context
        self._clock, self._observe, self.tools = clock, observe, tools
        self._running: dict[str, Call] = {}
        self._by_request: dict[tuple[Origin, RequestId], Call] = {}
        self._callers: dict[str, tuple[Caller, Mapping[str, Any]]] = {}
        self._kept = 0

    def start(self, request: Request, origin: Origin, caller: Caller, tool: str, arguments: Mapping[str, Any]) -> Call:
        """Begins the work and returns at once. Too many at a time, an unknown tool, wrong arguments: the call's answer says so."""
        call = Call(request.id, origin, tool, token=request.progress_token, modern=request.modern)
        self._launch(call, replace(caller, call=call.id), arguments)
        return call

    def cancel(self, origin: Origin, request: RequestId) -> None:
        """The client of that request waits no longer. Without a session a request's number names nothing: every client counts from 1."""
        call = self._by_request.get((origin, request))
        if call and origin.session:
            call.give_up()

    async def keep(self, call: Call) -> None:
        """Puts the call into the database; from now on its answer will be found there, also after a restart."""
        caller, arguments = self._callers.get(call.id, (None, {}))
        request = {"id": call.request, "token": call.token, "arguments": dict(arguments), "caller": asdict(caller) if caller else None}
        record = CallRecord(call.id, call.origin.account, call.origin.session, call.tool, json.dumps(request), self._clock())
        call.kept = True
        try:
            await self._database.run(store.add, record)
        except sqlite3.Error:  # a full disk must not cost the answer of a client that is still there
            log.exception("call %s could not be stored", call.id)
            call.kept = False
            return
        if call.done:  # it ended while the row was written
            await self._store_answer(call, call.seq, call.events[-1].data)
        self._kept += 1
        if self._kept % PRUNE_EVERY == 1:
            await self._database.run(store.prune, before=self._clock() - KEEP_AGE, keep=KEEP_COUNT)

    async def resume(self, origin: Origin, name: str, seq: int) -> Call | None:
        """The call that a client followed up to event `seq`; None if it is unknown, forgotten or not from that origin.
        One that a restart cut short runs again where the tool can pick up its work, and else answers `call_interrupted`."""
        if live := self._running.get(name):
            return self._welcome(live, origin)
        record = await self._database.run(store.find, name)
        if live := self._running.get(name):  # another stream of the same client took it up meanwhile
            return self._welcome(live, origin)
        if record is None or (record.account, record.session) != (origin.account, origin.session):
            return None
        saved = json.loads(record.request)
        call = Call(saved.get("id", 0), origin, record.tool, token=saved.get("token"), modern=False, name=name)
        call.kept = True
        if record.answer is not None and record.seq is not None:
            call.seq = record.seq - 1
            call.answer(record.answer.encode())
            return call
        call.seq = seq
        tool = self.tools.get(record.tool)
        if tool is None or not tool.resumable or saved["caller"] is None:
            await self._end(call, surface.failure(INTERRUPTED))
        else:
            self._launch(call, Caller(**saved["caller"]), saved["arguments"])
        return call

    def _welcome(self, call: Call, origin: Origin) -> Call | None:
        if call.origin != origin:
            return None
        call.given_up = False
        return call

    def _launch(self, call: Call, caller: Caller, arguments: Mapping[str, Any]) -> None:
        if len(self._running) >= MAX_RUNNING:
            call.answer(_response(call, surface.failure(TOO_MANY)))
            return
        self._running[call.id] = call
        self._by_request[call.origin, call.request] = call
        self._callers[call.id] = (caller, arguments)
        self._nursery.start_soon(self._work, call, caller, arguments, name=f"{call.tool} {call.id[:8]}")

    async def _work(self, call: Call, caller: Caller, arguments: Mapping[str, Any]) -> None:
        outcome = "ok"
        try:
            with trio.fail_after(CALL_LIMIT):
                result = surface.content(await self._run(call, caller, arguments))
        except ToolError as error:
            outcome, result = error.code, surface.failure(error)
        except trio.TooSlowError:
            outcome, result = TOO_LONG.code, surface.failure(TOO_LONG)
        except Exception:
            log.exception("%s failed (call %s)", call.tool, call.id)
            outcome, result = "internal_error", surface.failure(_internal(call.id))
        try:
            await self._end(call, result)
        finally:
            del self._running[call.id], self._callers[call.id]
            if self._by_request.get((call.origin, call.request)) is call:
                del self._by_request[call.origin, call.request]
        if self._observe is not None:
            self._observe(call.tool if call.tool in self.tools else "unknown", outcome, trio.current_time() - call.began)

    async def _run(self, call: Call, caller: Caller, arguments: Mapping[str, Any]) -> Result:
        tool = self.tools.get(call.tool)
        if tool is None:
            known = ", ".join(self.tools)
            raise ToolError("unknown_tool", f"There is no tool {call.tool[:100]!r}", cause=f"The tools are {known}.", hop="agent")
        parsed = parse(tool, arguments)
        async with self._open_context(caller, call.tell) as context:
            return await tool.run(context, parsed)

    async def _end(self, call: Call, result: dict[str, Any]) -> None:
        data = _response(call, result)
        if call.kept:  # stored before it is sent: what a client may have seen can always be asked for again
            await self._store_answer(call, call.seq + 1, data)
        call.answer(data)

    async def _store_answer(self, call: Call, seq: int, data: bytes) -> None:
        try:
            await self._database.run(store.finish, call.id, seq, data.decode())
        except sqlite3.Error:
            log.exception("the answer of call %s could not be stored", call.id)


def _response(call: Call, result: dict[str, Any]) -> bytes:
    shown = surface.modern(result, cacheable=False) if call.modern else result
    return encode({"jsonrpc": "2.0", "id": call.request, "result": shown})


INTERRUPTED: Final = ToolError(
    "call_interrupted",
    "The coordinator restarted while this call ran",
    cause="Its result is not known; the work may be done.",
    remedy="Look first (sandbox_status, sandbox_list), then repeat the call if nothing happened.",
)
TOO_MANY: Final = ToolError("too_many_calls", f"{MAX_RUNNING} calls are running already", remedy="Call again in a few seconds.")
TOO_LONG: Final = ToolError(
    "call_too_long",
    f"The call was given up after {CALL_LIMIT / 60:.0f} minutes",
    cause="The work itself goes on.",
    remedy='Follow it with sandbox_procs {action: "list"}.',
)


def _internal(call: str) -> ToolError:
    return ToolError("internal_error", "The coordinator failed on this call", remedy=f"Tell the operator: the log has it as call {call}.")
