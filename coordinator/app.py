"""The doors that are two apps in one: raw ASGI functions that look at the path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from coordinator.context import open_context
from coordinator.mcp.calls import Calls
from coordinator.mcp.endpoint import Endpoint
from coordinator.rest.admin import make_admin
from coordinator.rest.api import make_app
from coordinator.services import Services

Asgi = Callable[[Any, Any, Any], Awaitable[None]]

PUBLIC = "/public"


def make_public(services: Services) -> Asgi:
    """The ASGI app for `listen`: /mcp to its endpoint, the rest to REST."""
    rest: Any = make_app(services)
    calls = Calls(
        services.nursery, services.database, partial(open_context, services), clock=services.clock, observe=services.metrics.tool_call
    )
    mcp = Endpoint(calls, services.keys, public_url=services.public_url)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        door = mcp if scope["type"] == "http" and scope["path"].rstrip("/") == "/mcp" else rest
        await door(scope, receive, send)

    return app


def make_operator(services: Services) -> Asgi:
    """The ASGI app for the local socket: the operator's API, and below /public REST as at the public door, with the same keys. So boxctl
    needs neither a name that resolves to `public_url` nor trust in its certificate."""
    admin: Any = make_admin(services)
    rest: Any = make_app(services)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{PUBLIC}/"):
            below = {"path": scope["path"].removeprefix(PUBLIC), "raw_path": scope["raw_path"].removeprefix(PUBLIC.encode())}
            await rest({**scope, **below}, receive, send)
        else:
            await admin(scope, receive, send)

    return app
