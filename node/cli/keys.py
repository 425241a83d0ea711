"""`boxctl key ...`: API keys of agents."""

from __future__ import annotations

from typing import Annotated

import typer

from node.cli import show
from node.cli.coordinator import Coordinator
from node.config import Places

app = typer.Typer(no_args_is_help=True, help="API keys with which agents connect.")

Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Name = Annotated[str, typer.Argument(help="Whose key it is, say the name of a person or a machine.")]


@app.command()
def create(name: Name, json: Json = False) -> None:
    """Make a key and print it, this once: only its hash is kept."""
    made = Coordinator(Places.from_environment()).create_key(name)
    if json:
        show.print_json(made)
    else:
        show.out().print(made["key"], markup=False)
        show.say("keep it now: it cannot be shown again")


@app.command("list")
def list_keys(json: Json = False) -> None:
    """The keys that work or worked; never the keys themselves."""
    keys = Coordinator(Places.from_environment()).keys()
    if json:
        show.print_json(keys)
        return
    rows = ((k["name"], show.ago(k["createdAt"]), show.ago(k["lastUsedAt"]), "revoked" if k.get("revokedAt") else "works") for k in keys)
    show.print_table(("NAME", "CREATED", "LAST USED", "STATE"), rows)


@app.command()
def revoke(name: Name, json: Json = False) -> None:
    """End a key at once."""
    answer = Coordinator(Places.from_environment()).revoke_key(name)
    if json:
        show.print_json(answer)
    else:
        show.say(f"{name} is revoked")
