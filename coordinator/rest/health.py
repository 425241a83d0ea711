"""Whether the coordinator can do its work, and what stands in the way."""

from __future__ import annotations

import sqlite3
from typing import Any

import trio

from coordinator.services import Services

ANSWER_WITHIN = 2.0  # s


async def health(services: Services) -> dict[str, Any]:
    """{ok, problems: [text]}: ok means that the database answers and at least one node can run boxes."""
    problems = []
    if not await _database_answers(services):
        problems.append("the database does not answer")
    states = [services.fleet.state(member) for member in services.fleet.members()]
    if "ready" not in states:
        problems.append("no node is ready: " + (", ".join(states) or "none has enrolled"))
    return {"ok": not problems, "problems": problems}


async def _database_answers(services: Services) -> bool:
    with trio.move_on_after(ANSWER_WITHIN):
        try:
            await services.database.run(lambda connection: connection.execute("SELECT 1").fetchone())
        except (sqlite3.Error, ValueError):
            return False
        return True
    return False
