"""Steps side by side, with errors as if they had come one after another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import trio

from node.errors import NodeError


@asynccontextmanager
async def together() -> AsyncIterator[trio.Nursery]:
    """A nursery whose typed errors come out as themselves, not as groups: the first of several is told. All else passes unchanged."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        errors = list(leaves(group))
        told = next((error for error in errors if isinstance(error, NodeError)), None)
        if told is None or any(not isinstance(error, (NodeError, trio.Cancelled)) for error in errors):
            raise
        raise told from group


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
