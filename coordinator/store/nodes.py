"""Nodes, and the one-time tokens with which they enrol."""

from __future__ import annotations

import sqlite3
from dataclasses import astuple, dataclass

from coordinator.store.database import insert, update


@dataclass(frozen=True)
class NodeRecord:
    id: str
    name: str
    digest: str
    address: str
    certificate: str
    enrolled_at: float
    seen_at: float


COLUMNS = "id, name, digest, address, certificate, enrolled_at, seen_at"


def every(connection: sqlite3.Connection) -> list[NodeRecord]:
    return [NodeRecord(*row) for row in connection.execute(f"SELECT {COLUMNS} FROM nodes ORDER BY enrolled_at")]  # noqa: S608


def seen(connection: sqlite3.Connection, node: str, *, address: str, certificate: str, now: float) -> None:
    update(connection, "nodes", ("id", node), {"address": address, "certificate": certificate, "seen_at": now})


def remove(connection: sqlite3.Connection, node: str) -> bool:
    return connection.execute("DELETE FROM nodes WHERE id = ?", (node,)).rowcount > 0


def add_token(connection: sqlite3.Connection, *, digest: str, name: str, now: float, expires_at: float) -> None:
    connection.execute("DELETE FROM enrolment_tokens WHERE expires_at < ?", (now,))
    insert(connection, "enrolment_tokens", {"digest": digest, "name": name, "created_at": now, "expires_at": expires_at})


def token_name(connection: sqlite3.Connection, digest: str, now: float) -> str | None:
    """The name for the node that this token may enrol; None if it is unknown, used or too old."""
    row = connection.execute(
        "SELECT name FROM enrolment_tokens WHERE digest = ? AND used_at IS NULL AND expires_at > ?", (digest, now)
    ).fetchone()
    return row[0] if row else None


def enrol(connection: sqlite3.Connection, token_digest: str, record: NodeRecord) -> bool:
    """Spends the token and adds the node, both or neither. False: the token was spent meanwhile."""
    now = record.enrolled_at
    spent = connection.execute(
        "UPDATE enrolment_tokens SET used_at = ? WHERE digest = ? AND used_at IS NULL AND expires_at > ?", (now, token_digest, now)
    ).rowcount
    if spent:
        connection.execute(f"INSERT INTO nodes ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(record))  # noqa: S608
    return bool(spent)
