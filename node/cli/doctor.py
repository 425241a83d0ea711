"""`boxctl doctor`: is this host fit, and if not, what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from node.cli import show
from node.cli.daemons import Daemon
from node.config import NodeConfig, Places, load_node_config
from node.errors import NodeError

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(json: Annotated[bool, typer.Option("--json", help="[{name, status, detail, fix}]")] = False) -> None:
    """Check this host. Ends with 1 when something must be mended."""
    from node.doctor.checks import judge
    from node.doctor.facts import gather

    places, problem = Places.from_environment(), ""
    try:
        config = load_node_config(places)
    except NodeError as error:
        config, problem = NodeConfig(places), f"{error} {error.problem.cause}".strip()
    with show.progress("looking at this host"):
        checks = judge(gather(config, node_runs=Daemon("node", places).pid() is not None, config_problem=problem))
    if json:
        show.print_json([asdict(check) for check in checks])
    else:
        rows = ((Text(check.status, style=COLOURS[check.status]), check.name, check.detail) for check in checks)
        show.print_table(("", "CHECK", "FOUND"), rows)
        for check in checks:
            if check.fix:
                show.say(f"{check.name}: {check.fix}")
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
