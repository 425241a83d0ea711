"""The fleet door: what nodes ask of the coordinator, over TLS (node/protocol.py has the messages).

    POST /v1/fleet/enrol      Enrol     -> Enrolled          one-time token in the body
    POST /v1/fleet/heartbeat  Heartbeat -> HeartbeatAnswer   Authorization: Bearer <node token>; 401 when the node is not of the fleet
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from quart import request
from quart_trio import QuartTrio

from coordinator.errors import BadInput
from coordinator.fleet import Fleet
from coordinator.keys import bearer
from coordinator.rest.api import errors_as_json
from node.protocol import Enrol, Heartbeat, Wire

W = TypeVar("W", bound=Wire)
MAX_BODY = 4 << 20  # bytes: a heartbeat lists every box of a node


def make_fleet_door(fleet: Fleet) -> QuartTrio:
    app = QuartTrio("boxfleet-fleet-door")
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    errors_as_json(app)

    @app.post("/v1/fleet/enrol")
    async def enrol() -> dict[str, Any]:
        return (await fleet.enrol(await _body(Enrol))).wire()

    @app.post("/v1/fleet/heartbeat")
    async def heartbeat() -> dict[str, Any]:
        token = bearer(request.headers.get("authorization"))
        return (await fleet.heartbeat(token, await _body(Heartbeat))).wire()

    return app


async def _body(model: type[W]) -> W:
    try:
        return model.model_validate_json(await request.get_data(cache=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadInput(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from error
