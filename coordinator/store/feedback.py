"""What agents said about their work with the product."""

from __future__ import annotations

import sqlite3
from typing import Any

from coordinator.store.database import insert


def add(connection: sqlite3.Connection, /, **values: Any) -> int:
    return insert(connection, "feedback", values)
