"""API keys: hashes, names, and when they were used or revoked."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from coordinator.store.database import insert


@dataclass(frozen=True)
class Key:
    id: int
    name: str
    account: str
    created_at: float
    last_used_at: float | None
    revoked_at: float | None


COLUMNS = "id, name, account, created_at, last_used_at, revoked_at"


def add(connection: sqlite3.Connection, *, digest: str, name: str, account: str, now: float) -> Key:
    number = insert(connection, "keys", {"digest": digest, "name": name, "account": account, "created_at": now})
    return Key(number, name, account, now, None, None)


def find(connection: sqlite3.Connection, digest: str, now: float) -> Key | None:
    """The key of that digest unless it was revoked; marks it as used."""
    row = connection.execute(
        f"UPDATE keys SET last_used_at = ? WHERE digest = ? AND revoked_at IS NULL RETURNING {COLUMNS}",  # noqa: S608
        (now, digest),
    ).fetchone()
    return Key(*row) if row else None


def every(connection: sqlite3.Connection) -> list[Key]:
    return [Key(*row) for row in connection.execute(f"SELECT {COLUMNS} FROM keys ORDER BY id")]  # noqa: S608


def revoke(connection: sqlite3.Connection, name: str, now: float) -> int:
    """Revokes every key of that name; how many there were."""
    return connection.execute("UPDATE keys SET revoked_at = ? WHERE name = ? AND revoked_at IS NULL", (now, name)).rowcount
