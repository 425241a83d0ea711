"""Operations: work that belongs to the node, with any number of clients waiting for it.

A client that goes away stops waiting, not the work; the same request again joins the work under way (node/protocol.py). An operation tells
its latest progress; slow watchers miss steps, never the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import trio

from node.errors import NodeError
from node.protocol import Event, Problem, Wire

ALIVE_EVERY = 5.0  # seconds between lines at the most

Report = Callable[[str, float | None], None]  # what is being done, and how much of it is


class Work(Protocol):
    def __call__(self, report: Report) -> Awaitable[Wire]: ...


class Operation:
    """One piece of work and its watchers."""

    def __init__(self) -> None:
        self._progress = Event(type="alive")
        self._end: Event | None = None
        self._changed = trio.Event()

    def report(self, message: str, fraction: float | None = None) -> None:
        self._tell(Event(type="progress", message=message, fraction=fraction))

    async def run(self, work: Work, log: Callable[[str], None]) -> None:
        """Runs the work to its end; every failure becomes the operation's error, so that no watcher waits in vain."""
        problem = Problem(code="node_stopping", message="the node is stopping", remedy="Call again once it runs.")
        try:
            result = await work(self.report)
        except NodeError as error:
            problem = error.problem
        except Exception as error:  # a defect of ours: told by name, its text kept for the log
            log(f"operation failed: {error!r}")
            problem = Problem(code="node_defect", message="the node failed in a way it does not know", cause=type(error).__name__)
        else:
            self._end = Event(type="result", result=result.wire())
        finally:
            self._end = self._end or Event(type="error", error=problem)
            self._tell(self._end)

    async def events(self) -> AsyncIterator[Event]:
        """Progress as it comes, `alive` at least every ALIVE_EVERY seconds, the end as the last event."""
        seen: Event | None = None
        while True:
            changed, latest = self._changed, self._end or self._progress
            if latest is not seen:
                seen = latest
                yield latest
            if self._end is not None and latest is self._end:
                return
            with trio.move_on_after(ALIVE_EVERY) as waited:
                await changed.wait()
            if waited.cancelled_caught:
                yield Event(type="alive")

    def _tell(self, event: Event) -> None:
        self._progress = event
        changed, self._changed = self._changed, trio.Event()
        changed.set()


class Operations:
    """The operations under way, by key: one at a time for each key."""

    def __init__(self, nursery: trio.Nursery, log: Callable[[str], None]) -> None:
        self._nursery = nursery
        self._log = log
        self._running: dict[str, Operation] = {}

    def join(self, key: str, work: Work) -> Operation:
        """The operation under this key: the one that runs, or a new one that does `work`."""
        if key not in self._running:
            self._running[key] = operation = Operation()
            self._nursery.start_soon(self._run, key, operation, work)
        return self._running[key]

    async def _run(self, key: str, operation: Operation, work: Work) -> None:
        try:
            await operation.run(work, self._log)
        finally:
            del self._running[key]
