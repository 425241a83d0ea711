"""Bytes between an attached command in a box and its client, both ways, with backpressure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio


class Frames(Protocol):
    """An attached command: boxd's frames as they are (image/boxd/protocol.py)."""

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes:
        """The next frames, b"" at the end."""


async def relay_attach(box: Frames, receive: Callable[[], Awaitable[str | bytes]], send: Callable[[bytes], Awaitable[None]]) -> None:
    """Runs until the box's side ends. When the client's side ends first (it raises), the command is hung up with it."""

    async def into_the_box(nursery: trio.Nursery) -> None:
        while True:
            data = await receive()
            await box.send(data.encode() if isinstance(data, str) else data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(into_the_box, nursery)
        while data := await box.receive():
            await send(data)
        nursery.cancel_scope.cancel()
