"""What agents say to the people who run this service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coordinator.boxes import BoxService
from coordinator.clock import Clock
from coordinator.store import feedback as table
from coordinator.store.database import Database
from tools.context import Caller, Words


class WordService:
    def __init__(self, database: Database, boxes: BoxService, clock: Clock) -> None:
        self._database, self._boxes, self._clock = database, boxes, clock

    def for_caller(self, caller: Caller) -> Words:
        return CallerWords(caller, self._database, self._boxes, self._clock)


@dataclass(frozen=True)
class CallerWords:
    _caller: Caller
    _database: Database
    _boxes: BoxService
    _clock: Clock

    async def feedback(self, *, task: str, usage: str, problems: str, suggestions: str, box: str | None) -> dict[str, Any]:
        """Keeps it. Raises BoxNotFound for a box that is not of the caller's account."""
        if box is not None:
            await self._boxes.own(self._caller, box)
        caller = self._caller
        who = {"account": caller.account, "conversation": caller.conversation, "client": caller.client, "box": box}
        what = {"task": task, "usage": usage, "problems": problems, "suggestions": suggestions}
        number = await self._database.run(table.add, at=self._clock(), **who, **what)
        return {"ok": True, "feedbackId": number}
