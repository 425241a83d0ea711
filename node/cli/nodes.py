"""`boxctl node ...`: the fleet, as the coordinator of this host knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from node.cli import show
from node.cli.coordinator import Coordinator
from node.cli.failure import NotFound
from node.config import Places

app = typer.Typer(no_args_is_help=True, help="Nodes of the fleet.")

ONLY_HERE = {"127.0.0.1", "::1", "localhost"}

Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Node = Annotated[str, typer.Argument(metavar="NODE", help="Its id.")]


@app.command("list")
def list_nodes(json: Json = False) -> None:
    """The hosts that run boxes for this coordinator."""
    nodes = Coordinator(Places.from_environment()).nodes()
    if json:
        show.print_json(nodes)
    else:
        show.print_table(("ID", "NAME", "STATE", "ADDRESS", "BOXES", "HEARD"), map(_row, nodes))


@app.command("show")
def show_node(node: Node, json: Json = False) -> None:
    """One host: what it has and how much of it is used."""
    found = _find(node)
    if json:
        show.print_json(found)
        return
    capacity = found.get("capacity") or {}
    show.print_fields(
        (
            ("id", found["id"]),
            ("name", found.get("name")),
            ("state", found["state"]),
            ("address", found.get("address")),
            ("heard", show.ago(found.get("heardAt"))),
            ("version", found.get("version")),
            ("accel", found.get("accel")),
            ("boxes", found.get("boxes")),
            ("memory", _used(capacity.get("memoryUsed"), capacity.get("memoryTotal"))),
            ("disk free", show.size(capacity.get("diskFree"))),
            ("vcpus", f"{capacity['vcpusUsed']} of {capacity['vcpus']}" if capacity else ""),
            ("images", ", ".join(sorted({image["flavour"] for image in found.get("images", [])}))),
            ("problem", (found.get("problem") or {}).get("message")),
        )
    )


@app.command()
def token(name: Annotated[str, typer.Option(help="What you call the new host.")] = "", json: Json = False) -> None:
    """A one-time token with which one more host may join: the JSON for /var/lib/boxfleet/node/enrol.token there."""
    made = Coordinator(Places.from_environment()).create_node_token(name, here=False)
    show.print_json(made)
    if urlsplit(str(made["coordinator"])).hostname in ONLY_HERE:
        show.warn(
            f"only this host can reach {made['coordinator']}: for others set fleet_listen and fleet_names in [coordinator], then ask again"
        )
    if not json:
        show.say(f"On the new host, put this into {Places.usual().enrol_token} (0600) and run `boxctl up --node-only`. It works once.")


@app.command("rm")
def remove(node: Node) -> None:
    """Forget a host: it takes no further part. Its VMs are not touched."""
    Coordinator(Places.from_environment()).remove_node(str(_find(node)["id"]))
    show.say(f"{node} is forgotten")


def _find(node: str) -> Mapping[str, Any]:
    found = [known for known in Coordinator(Places.from_environment()).nodes() if node in (known["id"], known["name"])]
    if not found:
        raise NotFound(f"there is no node {node!r}", remedy="See which there are: `boxctl node list`.")
    return found[0]


def _row(node: Mapping[str, Any]) -> tuple[object, ...]:
    return node["id"], node["name"], node["state"], node["address"], node.get("boxes", ""), show.ago(node.get("heardAt"))


def _used(used: float | None, total: float | None) -> str:
    return f"{show.size(used)} of {show.size(total)}" if total else ""
