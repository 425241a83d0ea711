"""`boxctl status`: what runs on this host, told by the daemons themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from node.cli import show
from node.cli.api import Api
from node.cli.boxes import box_table
from node.cli.coordinator import Coordinator
from node.cli.daemons import Daemon
from node.cli.failure import Failure
from node.config import Places

Part = dict[str, Any]


def status(json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """What runs: coordinator, node, boxes."""
    found = look(Places.from_environment())
    if json:
        show.print_json(found)
        return
    show.print_table(("DAEMON", "PID", "STATE", "WHERE"), (_row(name, found[name]) for name in ("coordinator", "node")))
    if found["boxes"]:
        show.out().print()
        box_table(found["boxes"])
    if not found["coordinator"] or not found["node"]:
        show.say("start what is not running: `boxctl up`")


def look(places: Places) -> dict[str, Any]:
    """{coordinator: {pid, url, mcpUrl, ...} | null, node: {pid, ...} | null, boxes: [BoxView]}. A daemon that runs and does not answer is
    there with `problem`."""
    node = _part(Daemon("node", places), lambda: Api.on_socket("node", places.node_socket).ask("GET", "/v1/node"))
    boxes = (node or {}).pop("boxes", [])
    coordinator = _part(Daemon("coordinator", places), lambda: dict(Coordinator(places).status()))
    return {"coordinator": coordinator, "node": node, "boxes": boxes}


def _part(daemon: Daemon, ask: Callable[[], Part]) -> Part | None:
    pid = daemon.pid()
    if pid is None:
        return None
    try:
        answer = ask()
    except Failure as failure:
        answer = {"ready": False, "problem": {"message": str(failure), "cause": failure.cause, "remedy": failure.remedy}}
    return {"pid": pid} | answer | {"pid": pid, "log": str(daemon.log)}


def _row(name: str, part: Mapping[str, Any] | None) -> tuple[object, ...]:
    if part is None:
        return name, "", "not running", ""
    problem = part.get("problem") or {}
    state = "ready" if part.get("ready", True) and not problem else f"not ready: {problem.get('message', 'starting')}"
    where = part.get("mcpUrl") or (f"{part['accel']}, {show.size(part['capacity']['memoryTotal'])} for boxes" if "capacity" in part else "")
    return name, part["pid"], state, where
