"""`boxctl connect`: what to paste where, so that an agent finds its tools."""

from __future__ import annotations

import json as encoder
import shlex
from typing import Annotated

import typer

from node.cli import show
from node.cli.coordinator import Coordinator
from node.config import Places


def connect(json: Annotated[bool, typer.Option("--json", help="{mcpUrl, apiUrl, apiKey}")] = False) -> None:
    """How to connect an agent: lines to paste. They hold the local API key."""
    coordinator = Coordinator.with_local_key(Places.from_environment())
    status = coordinator.status()
    if json:
        show.print_json({"mcpUrl": status["mcpUrl"], "apiUrl": status["apiUrl"], "apiKey": coordinator.key})
        return
    for title, text in recipes(str(status["mcpUrl"]), coordinator.key):
        show.say(f"# {title}")
        show.out().print(text + "\n", markup=False)


def recipes(url: str, key: str) -> list[tuple[str, str]]:
    """(for which client, what to paste)"""
    authorization = f"Authorization: Bearer {key}"
    generic = {"mcpServers": {"boxfleet": {"type": "http", "url": url, "headers": {"Authorization": f"Bearer {key}"}}}}
    return [
        ("Claude Code", f"claude mcp add --transport http boxfleet {shlex.quote(url)} --header {shlex.quote(authorization)}"),
        (
            "Codex: this in ~/.codex/config.toml",
            f'[mcp_servers.boxfleet]\nurl = "{url}"\nhttp_headers = {{ "Authorization" = "Bearer {key}" }}\ntool_timeout_sec = 1800',
        ),
        ("any other client", encoder.dumps(generic, indent=2)),
    ]


