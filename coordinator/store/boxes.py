"""Boxes as people know them: whose, what for, where, and how far their start has come. What the VM does, the node knows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.store.database import insert, update
from node.protocol import BoxState, BoxView

Stage = Literal["claimed", "starting", "live", "failed", "stopped"]


@dataclass(frozen=True)
class BoxRecord:
    id: str
    account: str
    conversation: str
    client: str | None
    name: str
    goal: str
    flavour: str
    size: int
    created_at: float
    node: str | None
    stage: Stage
    stage_at: float
    node_state: str | None
    deletes_at: float | None
    problem: str | None
    said: str | None
    said_at: float | None
    stop_answer: str | None
    stop_delete: bool | None
    stop_at: float | None


COLUMNS = ", ".join(BoxRecord.__dataclass_fields__)
SELECT = f"SELECT {COLUMNS} FROM boxes"  # noqa: S608


def claim(
    connection: sqlite3.Connection,
    *,
    box: str,
    account: str,
    conversation: str,
    client: str | None,
    name: str,
    goal: str,
    flavour: str,
    size: int,
    now: float,
) -> BoxRecord:
    insert(
        connection,
        "boxes",
        {
            "id": box,
            "account": account,
            "conversation": conversation,
            "client": client,
            "name": name,
            "goal": goal,
            "flavour": flavour,
            "size": size,
            "created_at": now,
            "stage": "claimed",
            "stage_at": now,
        },
    )
    return get(connection, box)


def get(connection: sqlite3.Connection, box: str) -> BoxRecord:
    """Raises KeyError."""
    row = connection.execute(f"{SELECT} WHERE id = ?", (box,)).fetchone()
    if row is None:
        raise KeyError(box)
    return BoxRecord(*row)


def find(connection: sqlite3.Connection, account: str, box: str) -> BoxRecord | None:
    row = connection.execute(f"{SELECT} WHERE id = ? AND account = ?", (box, account)).fetchone()
    return BoxRecord(*row) if row else None


def of_account(connection: sqlite3.Connection, account: str | None, *, failed_since: float) -> list[BoxRecord]:
    """The account's boxes (None: everyone's), newest first, without deleted ones and without starts that failed before `failed_since`."""
    rows = connection.execute(
        f"{SELECT} WHERE (account = ?1 OR ?1 IS NULL) AND stage != 'stopped' AND (stage != 'failed' OR stage_at >= ?2)"
        " ORDER BY created_at DESC, id",
        (account, failed_since),
    )
    return [BoxRecord(*row) for row in rows]


def unfinished(connection: sqlite3.Connection) -> list[BoxRecord]:
    """Starts that a stopped coordinator left behind."""
    return [BoxRecord(*row) for row in connection.execute(f"{SELECT} WHERE stage IN ('claimed', 'starting') ORDER BY created_at")]


def on_node(connection: sqlite3.Connection, node: str) -> list[BoxRecord]:
    """What the database believes to be on that node."""
    return [BoxRecord(*row) for row in connection.execute(f"{SELECT} WHERE node = ? AND stage IN ('starting', 'live')", (node,))]


def observe(connection: sqlite3.Connection, node: str, views: Iterable[BoxView], now: float) -> None:
    """Keeps what a node says of its boxes. An archived box that is gone when its clock has run out was deleted by the node."""
    told = {view.id: view for view in views}
    for record in on_node(connection, node):
        view = told.get(record.id)
        if view and (view.state, view.deletes_at) != (record.node_state, record.deletes_at):
            change(connection, record.id, node_state=view.state.value, deletes_at=view.deletes_at)
        elif view is None and record.node_state == BoxState.ARCHIVED and (record.deletes_at or now + 1) <= now:
            change(connection, record.id, stage="stopped", stage_at=now)


def placed(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """(node, box) of every box that is believed to be somewhere."""
    return {tuple(row) for row in connection.execute("SELECT node, id FROM boxes WHERE node IS NOT NULL AND stage != 'stopped'")}


def reserve(
    connection: sqlite3.Connection, box: str, decide: Callable[[list[tuple[str, str, int]]], str], *, since: float, now: float
) -> str:
    """Gives the box the node that `decide` chooses, in the transaction in which it is told what is promised already: (node, box, size) of
    each start that is under way or, as its node may not have counted it yet, ended after `since`. What `decide` raises is passed on."""
    rows = connection.execute(
        "SELECT node, id, size FROM boxes WHERE node IS NOT NULL AND (stage = 'starting' OR (stage = 'live' AND stage_at >= ?))", (since,)
    )
    node = decide([tuple(row) for row in rows])
    change(connection, box, node=node, stage="starting", stage_at=now)
    return node


def remove(connection: sqlite3.Connection, box: str) -> None:
    """A record that never became a box."""
    connection.execute("DELETE FROM steps WHERE box = ?", (box,))
    connection.execute("DELETE FROM boxes WHERE id = ?", (box,))


def same_start(
    connection: sqlite3.Connection, *, account: str, conversation: str, name: str, goal: str, since: float
) -> BoxRecord | None:
    """The newest box that this very start has already made and that was not stopped since."""
    row = connection.execute(
        f"{SELECT} WHERE account = ? AND conversation = ? AND name = ? AND goal = ? AND created_at >= ?"
        " AND stage IN ('claimed', 'starting', 'live') AND stop_at IS NULL ORDER BY created_at DESC LIMIT 1",
        (account, conversation, name, goal, since),
    ).fetchone()
    return BoxRecord(*row) if row else None


def change(connection: sqlite3.Connection, /, box: str, **values: Any) -> BoxRecord:
    update(connection, "boxes", ("id", box), values)
    return get(connection, box)
