"""When each conversation was last heard of."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass


@dataclass(frozen=True)
class Presence:
    account: str
    id: str
    client: str | None = None
    last_call_at: float | None = None
    heartbeat_at: float | None = None
    left_at: float | None = None


COLUMNS = ", ".join(Presence.__dataclass_fields__)


def save(connection: sqlite3.Connection, presence: Presence) -> None:
    connection.execute(
        f"INSERT OR REPLACE INTO conversations ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",  # noqa: S608
        (presence.account, presence.id, presence.client, presence.last_call_at, presence.heartbeat_at, presence.left_at),
    )


def heard_since(connection: sqlite3.Connection, at: float) -> list[Presence]:
    """Conversations that gave a sign of life since then; older ones are dropped."""
    connection.execute("DELETE FROM conversations WHERE max(ifnull(last_call_at, 0), ifnull(heartbeat_at, 0)) < ?", (at,))
    return [Presence(*row) for row in connection.execute(f"SELECT {COLUMNS} FROM conversations")]  # noqa: S608
