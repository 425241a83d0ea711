"""Tool calls that became event streams, kept so that a broken link or a restart of the coordinator loses no result (CONTRACT 0.8, 0.12)."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from coordinator.store.database import insert


@dataclass(frozen=True)
class CallRecord:
    id: str  # 32 hex; the events' ids are "<id>.<seq>"
    account: str
    session: str  # mcp-session-id, "" without one
    tool: str
    request: str  # JSON {id, arguments, caller}: what it takes to run it again; emptied of arguments once ended
    started_at: float
    seq: int | None = None  # of the answer
    answer: str | None = None  # the JSON-RPC response


COLUMNS = "id, account, session, tool, request, started_at, seq, answer"


def add(connection: sqlite3.Connection, record: CallRecord) -> None:
    insert(connection, "calls", vars(record))


def finish(connection: sqlite3.Connection, call: str, seq: int, answer: str) -> None:
    connection.execute("UPDATE calls SET seq = ?, answer = ?, request = '{}' WHERE id = ?", (seq, answer, call))


def find(connection: sqlite3.Connection, call: str) -> CallRecord | None:
    row = connection.execute(f"SELECT {COLUMNS} FROM calls WHERE id = ?", (call,)).fetchone()  # noqa: S608
    return CallRecord(*row) if row else None


def prune(connection: sqlite3.Connection, *, before: float, keep: int) -> None:
    """Forgets what began before that time, and all but the newest `keep`."""
    connection.execute("DELETE FROM calls WHERE started_at < ?", (before,))
    connection.execute("DELETE FROM calls WHERE id IN (SELECT id FROM calls ORDER BY started_at DESC LIMIT -1 OFFSET ?)", (keep,))
