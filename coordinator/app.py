"""The public door: one raw ASGI function that sends /mcp to its endpoint and the rest to REST."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from coordinator.context import open_context
from coordinator.mcp.calls import Calls
from coordinator.mcp.endpoint import Endpoint
from coordinator.rest.api import make_app
from coordinator.services import Services

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


def make_public(services: Services) -> Asgi:
    """The ASGI app for `listen`."""
    rest: Any = make_app(services)
    calls = Calls(
        services.nursery, services.database, partial(open_context, services), clock=services.clock, observe=services.metrics.tool_call
    )
    mcp = Endpoint(calls, services.keys, public_url=services.public_url)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        door = mcp if scope["type"] == "http" and scope["path"].rstrip("/") == "/mcp" else rest
        await door(scope, receive, send)

    return app
