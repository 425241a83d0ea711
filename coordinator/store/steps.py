"""What was done in a box, without output: the last KEPT steps of each."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from coordinator.store.database import insert

KEPT = 30  # CONTRACT 3, sandbox_status


@dataclass(frozen=True)
class Step:
    at: float
    conversation: str
    tool: str
    cmd: str | None
    dir: str | None
    note: str | None
    exec_id: str | None
    exit_code: int | None
    signal: str | None
    timed_out: bool | None
    error: str | None


COLUMNS = ", ".join(Step.__dataclass_fields__)


def add(
    connection: sqlite3.Connection,
    box: str,
    *,
    at: float,
    conversation: str,
    tool: str,
    cmd: str | None = None,
    dir: str | None = None,
    note: str | None = None,
    exec_id: str | None = None,
) -> None:
    """A repeated execId is the same step."""
    if exec_id and connection.execute("SELECT 1 FROM steps WHERE box = ? AND exec_id = ?", (box, exec_id)).fetchone():
        return
    values = {"at": at, "conversation": conversation, "tool": tool, "cmd": cmd, "dir": dir, "note": note, "exec_id": exec_id}
    insert(connection, "steps", {"box": box, **values})
    connection.execute(
        "DELETE FROM steps WHERE box = ?1 AND id <= (SELECT id FROM steps WHERE box = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
        (box, KEPT),
    )


def finish(
    connection: sqlite3.Connection,
    box: str,
    exec_id: str,
    *,
    exit_code: int | None = None,
    signal: str | None = None,
    timed_out: bool | None = None,
    error: str | None = None,
) -> None:
    connection.execute(
        "UPDATE steps SET exit_code = ?, signal = ?, timed_out = ?, error = ? WHERE box = ? AND exec_id = ?",
        (exit_code, signal, timed_out, error, box, exec_id),
    )


def of_box(connection: sqlite3.Connection, box: str) -> list[Step]:
    """Oldest first."""
    return [Step(*row) for row in connection.execute(f"SELECT {COLUMNS} FROM steps WHERE box = ? ORDER BY id", (box,))]  # noqa: S608
