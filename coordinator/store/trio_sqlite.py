"""aiosqlite under trio: its worker thread and queue as they are, with a trio mailbox in place of asyncio.Future.

Overrides private methods of aiosqlite 0.22 (pinned in pyproject.toml).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Self, TypeVar

import aiosqlite
import trio
from aiosqlite.core import _STOP_RUNNING_SENTINEL
from outcome import Error, Outcome, Value

T = TypeVar("T")


class _Mailbox(Generic[T]):
    """The slice of asyncio.Future that aiosqlite's worker thread touches."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._task: trio.lowlevel.Task | None = None
        self._outcome: Outcome[T] | None = None

    def get_loop(self) -> _Mailbox[T]:
        return self

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            return  # nobody is left to read the answer

    def done(self) -> bool:
        return self._outcome is not None

    def set_result(self, value: T) -> None:
        self._finish(Value(value))

    def set_exception(self, error: BaseException) -> None:
        self._finish(Error(error))

    def _finish(self, outcome: Outcome[T]) -> None:
        self._outcome = outcome
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)

    async def wait(self) -> T:
        if self._outcome is None:
            self._task = trio.lowlevel.current_task()
            # a statement is never abandoned half way: a cancel waits for it and is raised by the next checkpoint
            await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return self._outcome.unwrap()  # type: ignore[union-attr]


class Connection(aiosqlite.Connection):
    """An aiosqlite connection whose awaits are trio's."""

    @property
    def raw(self) -> sqlite3.Connection:
        return self._conn

    async def job(self, function: Callable[[], T]) -> T:
        """Runs `function` on the connection's thread, after all that was asked for before it."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._running or self._connection is None:
            raise ValueError("the database is closed")
        return await self._post(function)

    async def _post(self, function: Callable[[], T]) -> T:
        mailbox: _Mailbox[T] = _Mailbox()
        self._tx.put_nowait((mailbox, function))  # type: ignore[arg-type]
        return await mailbox.wait()

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self.job(partial(fn, *args, **kwargs))

    async def __aenter__(self) -> Self:
        await self
        return self

    async def _connect(self) -> Connection:
        if self._connection is None:
            try:
                self._connection = await self._post(self._connector)
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        self._running = False
        self._tx.put_nowait((None, lambda: _STOP_RUNNING_SENTINEL))

    async def close(self) -> None:
        if self._connection is None:
            return
        with trio.CancelScope(shield=True):
            try:
                await self._post(self._connection.close)
            finally:
                self._connection = None
                self.stop()
