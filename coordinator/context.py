"""What a tool is given for one call (tools.context.Context)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from coordinator.node_client import Progress
from coordinator.services import Services
from tools.context import Boxes, Caller, Words


@dataclass(frozen=True)
class CallContext:
    caller: Caller
    boxes: Boxes
    words: Words
    tell: Progress

    async def progress(self, message: str, fraction: float | None = None) -> None:
        self.tell(message, fraction)


@asynccontextmanager
async def open_context(services: Services, caller: Caller, progress: Progress) -> AsyncIterator[CallContext]:
    """The caller's services; while it is open, the caller's conversation is working."""
    await services.conversations.called(caller.account, caller.conversation, caller.client)
    with services.conversations.calling(caller.account, caller.conversation):
        boxes, words = services.boxes.for_caller(caller, progress), services.words.for_caller(caller)
        yield CallContext(caller, boxes, words, progress)
