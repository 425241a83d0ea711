"""REST for agents and people, on the public door. Every answer is JSON; errors are {"error": text, "code", "cause", "remedy", "hop"}.

    GET    /v1/boxes                        -> {"boxes": [...]}     as sandbox_list
    POST   /v1/boxes {goal, name?, size?, flavour?, waitForCapacitySec?, restore?}  -> the box, when it is ready
    GET    /v1/boxes/{id}                   -> the whole view       as sandbox_status; never wakes
    POST   /v1/boxes/{id}/freeze|thaw       -> the box
    POST   /v1/boxes/{id}/stop              -> as sandbox_stop      archives
    DELETE /v1/boxes/{id}                   -> as sandbox_stop with delete: true
    GET    /v1/boxes/{id}/outputs/{execId}/stdout|stderr?expires&sig   the bytes; the signature is the permission
    POST   /v1/agents/{agent}/heartbeat {client?}, /v1/agents/{agent}/leave
    GET    /healthz, /metrics               without a key
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from coordinator.boxes import CallerBoxes
from coordinator.conversations import client_label, identify
from coordinator.errors import BadInput, CoordinatorError, Unauthorised, as_json
from coordinator.keys import bearer
from coordinator.links import Stream
from coordinator.rest.health import health
from coordinator.services import Services
from coordinator.store.keys import Key
from tools.context import Caller, ToolError

MAX_BODY = 64 * 1024  # bytes
PATIENCE = 1800.0  # s that a REST client may wait for capacity


class NewBox(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    goal: str = ""
    name: str = ""
    size: Literal[1, 2, 4] = 1
    flavour: str | None = None
    wait_for_capacity_sec: Annotated[float, Field(ge=0, le=PATIENCE)] = 0.0
    restore: str | None = None


def make_app(services: Services) -> QuartTrio:
    app = QuartTrio("boxfleet-coordinator")
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.config["RESPONSE_TIMEOUT"] = None  # an output streams for as long as it takes
    errors_as_json(app)

    @app.get("/v1/boxes")
    async def box_list() -> dict[str, Any]:
        return {"boxes": await (await _boxes(services)).list()}

    @app.post("/v1/boxes")
    async def start() -> tuple[dict[str, Any], int]:
        boxes, order = await _boxes(services), await _new_box()
        return await boxes.start(**order.model_dump()), 201

    @app.get("/v1/boxes/<box>")
    async def status(box: str) -> dict[str, Any]:
        return await (await _boxes(services)).status(box)

    @app.post("/v1/boxes/<box>/freeze")
    async def freeze(box: str) -> dict[str, Any]:
        return await (await _boxes(services)).freeze(box)

    @app.post("/v1/boxes/<box>/thaw")
    async def thaw(box: str) -> dict[str, Any]:
        return await (await _boxes(services)).thaw(box)

    @app.post("/v1/boxes/<box>/stop")
    async def stop(box: str) -> dict[str, Any]:
        return await (await _boxes(services)).stop(box, delete=False)

    @app.delete("/v1/boxes/<box>")
    async def delete(box: str) -> dict[str, Any]:
        return await (await _boxes(services)).stop(box, delete=True)

    @app.get("/v1/boxes/<box>/outputs/<exec_id>/<any(stdout, stderr):stream>")
    async def output(box: str, exec_id: str, stream: Stream) -> Response:
        if not services.links.opens(box, exec_id, stream, request.args.get("expires", ""), request.args.get("sig", "")):
            return _json({"error": "This link is not valid (any more)", "code": "link_expired", "remedy": "Ask for a new one."}, 403)
        chunks = _output(services, box, exec_id, stream)
        first = await anext(chunks, b"")  # so that a box that cannot be reached is an error, not a broken stream
        return Response(_prepend(first, chunks), content_type="application/octet-stream", headers=SAFE)

    @app.post("/v1/agents/<agent>/heartbeat")
    async def heartbeat(agent: str) -> dict[str, Any]:
        key, conversation = await _key(services), identify(agent=agent, session=None, key_name="", client=None)
        await services.conversations.heartbeat(key.account, conversation, await _client())
        return {"ok": True}

    @app.post("/v1/agents/<agent>/leave")
    async def leave(agent: str) -> dict[str, Any]:
        key, conversation = await _key(services), identify(agent=agent, session=None, key_name="", client=None)
        await services.conversations.leave(key.account, conversation)
        return {"ok": True}

    @app.get("/healthz")
    async def healthz() -> Response:
        report = await health(services)
        return _json(report, 200 if report["ok"] else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        boxes = [box["status"] for box in await services.boxes.every()]
        nodes = [services.fleet.state(member) for member in services.fleet.members()]
        return Response(services.metrics.text(boxes=boxes, nodes=nodes), content_type="text/plain; version=0.0.4; charset=utf-8")

    return app


# what a box printed is hostile: never a page of our origin
SAFE = {"x-content-type-options": "nosniff", "content-security-policy": "sandbox; default-src 'none'", "cache-control": "no-store"}


def errors_as_json(app: QuartTrio) -> None:
    """Every failure of the app as JSON: ToolErrors in their own words, unknown paths and methods, and defects without their text."""

    @app.errorhandler(ToolError)
    async def told(error: ToolError) -> Response:
        return _json(as_json(error), getattr(error, "status", 500))

    @app.errorhandler(HTTPException)
    async def refused(error: HTTPException) -> Response:
        code = (error.name or "error").lower().replace(" ", "_")
        return _json({"error": error.name or "Error", "code": code}, error.code or 500)

    @app.errorhandler(Exception)
    async def defect(error: Exception) -> Response:
        app.logger.exception("defect")
        return _json(as_json(CoordinatorError("The coordinator failed in a way it does not know", cause=type(error).__name__)), 500)


def _json(body: dict[str, Any], status: int) -> Response:
    response = Response(json.dumps(body), status=status, content_type="application/json")
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _key(services: Services) -> Key:
    key = await services.keys.verify(bearer(request.headers.get("authorization")))
    if key is None:
        raise Unauthorised("No valid API key came with the request")
    return key


async def _boxes(services: Services) -> CallerBoxes:
    """The boxes of whoever sent this request."""
    key = await _key(services)
    headers = request.headers
    client = client_label(headers.get("x-psbx-client"))
    conversation = identify(agent=headers.get("x-psbx-agent"), session=None, key_name=key.name, client=client)
    await services.conversations.called(key.account, conversation, client)
    return services.boxes.for_caller(Caller(key.account, key.name, conversation, client, PATIENCE))


async def _new_box() -> NewBox:
    try:
        return NewBox.model_validate_json(await request.get_data(cache=False) or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadInput(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from error


async def _client() -> str | None:
    """The heartbeat's {client}; the header, if the body has none. Only a label, so a body that makes no sense is no error."""
    body: object = None
    with suppress(ValueError, RecursionError):
        body = json.loads(await request.get_data(cache=False))
    client = body.get("client") if isinstance(body, dict) else None
    return client_label(client if isinstance(client, str) else request.headers.get("x-psbx-client"))


async def _output(services: Services, box: str, exec_id: str, stream: Stream) -> AsyncIterator[bytes]:
    async with services.boxes.output(box, exec_id, stream) as chunks:
        async for chunk in chunks:
            yield chunk


async def _prepend(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk
