"""The operator's API, on a local socket that only root can open (<run>/coordinator.sock, 0600); boxctl is its client. No key is asked for.

    GET    /v1/status                  -> {pid, version, url, mcpUrl, apiUrl, fleetUrl, startedAt, uptime, ok, problems: [text],
                                           nodes: [Node], boxes: {state: count}, orphans: [{node, box, name, state}]}
    GET    /v1/keys                    -> {"keys": [{id, name, account, createdAt, lastUsedAt, revokedAt}]}
    POST   /v1/keys {name, account?}   -> {key, name, account}         the key in the clear, this once
    DELETE /v1/keys/{name}             -> {"revoked": count}           404 when there is none of that name
    GET    /v1/nodes                   -> {"nodes": [{id, name, address, state, accel, version, heardAt, enrolledAt, capacity, images,
                                           boxes: count, problem}]}    state: ready | not_ready | unreachable
    POST   /v1/nodes/tokens {name?, here?}  -> {token, fleetCa, coordinator, name, expiresAt}   as it is, the file that a node enrols with;
                                           coordinator: the fleet door as other hosts reach it, or with `here` as this one does
    DELETE /v1/nodes/{id}              -> {"removed": id}              forgets the node; its VMs are not touched
    GET    /v1/boxes                   -> {"boxes": [...]}             of all accounts, each with account and node
    *      /public/v1/...              REST as at the public door (rest/api.py), for which a key is asked here too (coordinator/app.py)

Times of this API are ISO 8601. Errors are {"error": text, "code", "cause", "remedy", "hop"}, as at the public door.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.metadata import version
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from quart import request
from quart_trio import QuartTrio

from coordinator.clock import iso
from coordinator.errors import BadInput, CoordinatorError
from coordinator.fleet import Member
from coordinator.keys import MAIN_ACCOUNT
from coordinator.rest.api import MAX_BODY, errors_as_json
from coordinator.rest.health import health
from coordinator.services import Services

Order = TypeVar("Order", bound=BaseModel)


class KeyNotFound(CoordinatorError):
    default_code = "key_not_found"
    status = 404
    default_remedy = "List the keys: `boxctl key list`."


class NodeNotFound(CoordinatorError):
    default_code = "node_not_found"
    status = 404
    default_remedy = "List the nodes: `boxctl node list`."


class NewKey(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(default="", max_length=100)
    account: str = Field(default=MAIN_ACCOUNT, pattern=r"^[a-z0-9-]{1,64}$")


class NewNode(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(default="", max_length=100)
    here: bool = False  # on the coordinator's host


def make_admin(services: Services) -> QuartTrio:
    app = QuartTrio("boxfleet-coordinator-admin")
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    errors_as_json(app)
    fleet, keys = services.fleet, services.keys

    @app.get("/v1/status")
    async def status() -> dict[str, Any]:
        boxes, url = await services.boxes.every(), services.public_url
        orphans = [{"node": node, "box": box.id, "name": box.name, "state": box.state.value} for node, box in fleet.orphans()]
        return {
            "pid": os.getpid(),
            "version": version("boxfleet"),
            "url": url,
            "mcpUrl": f"{url}/mcp",
            "apiUrl": url,
            "fleetUrl": services.fleet_url,
            "startedAt": iso(services.started_at),
            "uptime": round(services.clock() - services.started_at, 3),
            **await health(services),
            "nodes": [_node(services, member) for member in fleet.members()],
            "boxes": dict(Counter(box["status"] for box in boxes)),
            "orphans": orphans,
        }

    @app.get("/v1/keys")
    async def key_list() -> dict[str, Any]:
        return {
            "keys": [
                {
                    "id": key.id,
                    "name": key.name,
                    "account": key.account,
                    "createdAt": iso(key.created_at),
                    "lastUsedAt": _iso(key.last_used_at),
                    "revokedAt": _iso(key.revoked_at),
                }
                for key in await keys.every()
            ]
        }

    @app.post("/v1/keys")
    async def key_create() -> dict[str, Any]:
        named = await _body(NewKey)
        if not named.name:
            raise BadInput("name is required")
        if any(key.name == named.name and key.revoked_at is None for key in await keys.every()):
            raise BadInput(f"There is a key {named.name!r} in force already", remedy="Choose another name, or revoke that one first.")
        secret, key = await keys.create(named.name, named.account)
        return {"key": secret, "name": key.name, "account": key.account}

    @app.delete("/v1/keys/<name>")
    async def key_revoke(name: str) -> dict[str, Any]:
        if not (count := await keys.revoke(name)):
            raise KeyNotFound(f"There is no key {name!r} in force")
        return {"revoked": count}

    @app.get("/v1/nodes")
    async def node_list() -> dict[str, Any]:
        return {"nodes": [_node(services, member) for member in fleet.members()]}

    @app.post("/v1/nodes/tokens")
    async def node_token() -> dict[str, Any]:
        order = await _body(NewNode)
        name = order.name or "node"
        token, expires_at = await fleet.create_token(name)
        return {
            "token": token,
            "fleetCa": fleet.ca,
            "coordinator": services.fleet_url if order.here else services.fleet_url_elsewhere,
            "name": name,
            "expiresAt": iso(expires_at),
        }

    @app.delete("/v1/nodes/<node>")
    async def node_remove(node: str) -> dict[str, Any]:
        if not await fleet.remove(node):
            raise NodeNotFound(f"There is no node {node!r}")
        return {"removed": node}

    @app.get("/v1/boxes")
    async def boxes() -> dict[str, Any]:
        return {"boxes": await services.boxes.every()}

    return app


async def _body(model: type[Order]) -> Order:
    try:
        return model.model_validate_json(await request.get_data(cache=False) or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadInput(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from error


def _node(services: Services, member: Member) -> dict[str, Any]:
    view, record = member.view, member.record
    told = {
        "id": record.id,
        "name": record.name,
        "address": record.address,
        "state": services.fleet.state(member),
        "enrolledAt": iso(record.enrolled_at),
        "heardAt": iso(member.heard_at),
    }
    if view is None:
        return told
    return told | {
        "accel": view.accel,
        "version": view.version,
        "capacity": view.capacity.wire(),
        "images": [image.wire() for image in view.images],
        "boxes": len(view.boxes),
        "problem": view.problem.wire() if view.problem else None,
    }


def _iso(at: float | None) -> str | None:
    return None if at is None else iso(at)
