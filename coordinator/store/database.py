"""One SQLite file, one connection, one thread. A transaction is one function that runs on that thread, so nothing interleaves with it:

    key = await database.run(keys.find, digest)

The modules beside this one hold such functions, a module a table; each takes the connection first and knows SQL, nothing else does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from coordinator.errors import CoordinatorError
from coordinator.store.migrations import MIGRATIONS
from coordinator.store.trio_sqlite import Connection

P = ParamSpec("P")
T = TypeVar("T")


class DatabaseTooNew(CoordinatorError):
    default_code = "database_too_new"
    default_remedy = "Run the version of boxfleet that wrote it, or a newer one; downgrades are not possible."


class Database:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def run(self, work: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(connection, ...)` as one transaction: committed when it returns, undone when it raises.
        A cancel before it began prevents it; one after that waits for it (it is short)."""
        return await self._connection.job(lambda: _transaction(self._connection.raw, lambda raw: work(raw, *args, **kwargs)))


@asynccontextmanager
async def open_database(path: Path) -> AsyncIterator[Database]:
    """The database, migrated. Raises DatabaseTooNew for a file that a later version wrote."""
    async with Connection(partial(_connect, path), iter_chunk_size=64) as connection:
        await connection.job(partial(_migrate, connection.raw))
        yield Database(connection)


def _connect(path: Path) -> sqlite3.Connection:
    # isolation_level=None: sqlite3 opens no transactions of its own; _transaction does, and says so
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=5000"):
        connection.execute(f"PRAGMA {pragma}")
    path.chmod(0o600)
    return connection


def _transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
    return result


def _migrate(connection: sqlite3.Connection) -> None:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise DatabaseTooNew(f"The database has schema {version}; this version of boxfleet knows {len(MIGRATIONS)}")
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")


def insert(connection: sqlite3.Connection, table: str, values: dict[str, Any]) -> int:
    """Adds a row and gives its rowid. `table` and the names come from this package, never from outside."""
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    cursor = connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))  # noqa: S608
    return cursor.lastrowid or 0


def update(connection: sqlite3.Connection, table: str, key: tuple[str, Any], values: dict[str, Any]) -> None:
    """Changes the row whose column key[0] is key[1]. `table` and the names come from this package, never from outside."""
    settings = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE {table} SET {settings} WHERE {key[0]} = ?", (*values.values(), key[1]))  # noqa: S608
