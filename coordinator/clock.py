"""Wall-clock time as a value that is passed in, so that tests decide what time it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], float]  # Unix seconds

wall_clock: Clock = time.time


def iso(at: float) -> str:
    """2026-07-28T09:30:00.123Z: what a JavaScript client parses without a thought."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
