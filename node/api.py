"""The node's HTTP API (node/protocol.py has the table): one quart-trio app behind two doors, the coordinator's and boxctl's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import trio
from pydantic import ValidationError
from quart import Response, request, websocket
from quart_trio import QuartTrio

from node.boxes import Boxes
from node.errors import BadRequest, NodeError
from node.operations import Operation
from node.protocol import AttachBox, NodeView, RunCommand, StartBox, WaitCommand, Wire
from node.relay import relay_attach
from node.vms import R

W = TypeVar("W", bound=Wire)
MAX_BODY = 1 << 20  # bytes of a JSON request; larger ones are refused before they are read


def make_api(boxes: Boxes[R], describe: Callable[[], NodeView]) -> QuartTrio:
    """The app. `describe` says what the node is and has; `boxes` does the work."""
    app = QuartTrio(__name__)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.config["RESPONSE_TIMEOUT"] = None  # operations and outputs stream for as long as they take

    @app.errorhandler(NodeError)
    async def told(error: NodeError) -> tuple[dict[str, Any], int]:
        return {"error": error.problem.wire()}, error.status

    @app.get("/v1/node")
    async def node() -> dict[str, Any]:
        return describe().wire()

    @app.get("/v1/boxes")
    async def box_list() -> dict[str, Any]:
        return {"boxes": [view.wire() for view in boxes.views()]}

    @app.get("/v1/boxes/<box>")
    async def box_view(box: str) -> dict[str, Any]:
        return (await boxes.look(box)).wire()

    @app.put("/v1/boxes/<box>")
    async def start(box: str) -> Response:
        return stream(boxes.start(box, await body(StartBox)))

    @app.delete("/v1/boxes/<box>")
    async def destroy(box: str) -> Response:
        return stream(boxes.change(box, "destroy"))

    @app.post("/v1/boxes/<box>/<any(freeze, thaw, archive, restore):change>")
    async def change(box: str, change: str) -> Response:
        return stream(boxes.change(box, change))

    @app.get("/v1/boxes/<box>/unsaved")
    async def unsaved(box: str) -> dict[str, Any]:
        return (await boxes.get(box).unsaved()).wire()

    @app.post("/v1/boxes/<box>/exec")
    async def run(box: str) -> Response:
        return stream(boxes.run(box, await body(RunCommand)))

    @app.get("/v1/boxes/<box>/commands")
    async def commands(box: str) -> dict[str, Any]:
        return {"commands": [command.wire() for command in await boxes.get(box).commands()]}

    @app.post("/v1/boxes/<box>/commands/<exec_id>/wait")
    async def wait(box: str, exec_id: str) -> Response:
        return stream(boxes.wait(box, exec_id, await body(WaitCommand)))

    @app.post("/v1/boxes/<box>/commands/<exec_id>/stop")
    async def stop(box: str, exec_id: str) -> dict[str, Any]:
        return (await boxes.get(box).stop_command(exec_id)).wire()

    @app.get("/v1/boxes/<box>/commands/<exec_id>/output/<any(stdout, stderr):name>")
    async def output(box: str, exec_id: str, name: str) -> Response:
        chunks = boxes.get(box).output(exec_id, name, offset=number("offset"), follow=number("follow") == 1)
        first = await anext(chunks, b"")  # so that an unknown command is a typed error, not a broken stream
        return Response(prepend(first, chunks), content_type="application/octet-stream")

    @app.get("/v1/boxes/<box>/console")
    async def console(box: str) -> Response:
        text = await trio.to_thread.run_sync(boxes.get(box).console)
        return Response(text, content_type="text/plain; charset=utf-8")

    @app.websocket("/v1/boxes/<box>/attach")
    async def attach(box: str) -> None:
        await websocket.accept()
        try:
            spec = AttachBox.model_validate_json(await websocket.receive())
            async with boxes.get(box).attach(spec) as stream:
                await relay_attach(stream, websocket.receive, websocket.send)
        except ValidationError as error:
            await websocket.send(json.dumps({"error": bad_input(error).problem.wire()}))
        except NodeError as error:
            await websocket.send(json.dumps({"error": error.problem.wire()}))

    return app


def stream(operation: Operation) -> Response:
    """An operation's events, one JSON object a line."""

    async def lines() -> AsyncIterator[bytes]:
        async for event in operation.events():
            yield event.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n"

    return Response(lines(), content_type="application/x-ndjson")


async def prepend(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk


async def body(model: type[W]) -> W:
    """The request's JSON body as `model`; an error names the field."""
    try:
        return model.model_validate_json(await request.get_data(cache=False) or b"{}")
    except ValidationError as error:
        raise bad_input(error) from error


def bad_input(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "the body"
    return BadRequest(f"{field}: {first['msg']}", remedy=f"Correct {field} and call again.")


def number(name: str) -> int:
    """A query parameter that is a whole number; 0 when absent."""
    value = request.args.get(name, "0")
    if not value.isdecimal() or len(value) > 18:
        raise BadRequest(f"{name} must be a whole number, not {value[:40]!r}")
    return int(value)
