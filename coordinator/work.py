"""Work that belongs to the coordinator, with any number of callers waiting for it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from coordinator.errors import CoordinatorError
from coordinator.node_client import Progress, unheard
from tools.context import ToolError

T = TypeVar("T")

log = logging.getLogger("boxfleet.work")


class CoordinatorStopping(CoordinatorError):
    default_code = "coordinator_stopping"
    status = 503
    default_remedy = "Call again in a few seconds; what was begun goes on."


class Work(Generic[T]):
    """One piece of work. A caller that goes away stops waiting, not the work; who comes later joins it and gets the same end."""

    def __init__(self) -> None:
        self._end: list[T] = []
        self._error: Exception | None = None
        self._latest: tuple[str, float | None] | None = None
        self._over = False
        self._changed = trio.Event()

    async def run(self, job: Callable[[Progress], Awaitable[T]]) -> None:
        """Does the job, to be started in a nursery that outlives the callers. Its errors go to those who wait, and only to them: one
        that is no ToolError is a defect of ours and is logged whole, but must not end everyone's work."""
        try:
            self._end = [await job(self._report)]
        except ToolError as error:
            self._error = error
        except trio.Cancelled:
            self._error = CoordinatorStopping("The coordinator is stopping")
            raise
        except Exception as error:
            log.exception("defect")
            self._error = CoordinatorError("The coordinator failed in a way it does not know", cause=type(error).__name__)
        finally:
            self._over = True
            self._tell()

    async def wait(self, progress: Progress = unheard) -> T:
        """The job's result, or its error; hands on the latest progress meanwhile (a slow listener misses steps)."""
        told = None
        while not self._over:
            changed, latest = self._changed, self._latest
            if latest is not None and latest is not told:
                told = latest
                progress(*latest)
            else:
                await changed.wait()
        if self._error is not None:
            raise self._error
        return self._end[0]

    def _report(self, message: str, fraction: float | None = None) -> None:
        self._latest = message, fraction
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
