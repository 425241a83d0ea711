"""Which clock acts next on a box: pure, the time is passed in (DESIGN "States and clocks").

A box freezes after `freeze_after` idle seconds. Idle begins at the last use, and use is a call (a tool that wakes, a wake). Requests
through URLs move it on for at most `url_use` after the last call; commands that run keep the box awake, and move it on when they end,
for at most `background` after the last call. A frozen box goes to the archive `archive_after` its last use, and from there it is
deleted. Time spent frozen never counts as running time (report 34), and a wake begins with a fresh idle period (reports 25, 31).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from node.config import Clocks
from node.protocol import BoxState

Action = Literal["freeze", "archive", "delete"]


@dataclass(frozen=True)
class Use:
    """What is known of a box's use; Unix seconds."""

    last_call_at: float  # calls and wakes
    last_url_at: float = 0.0
    commands_running: bool = False
    last_command_end: float = 0.0
    held: bool = False  # a call is inside the box right now


@dataclass(frozen=True)
class Due:
    action: Action
    at: float


def last_use(use: Use, clocks: Clocks) -> float:
    """The moment at which idleness began, commands that still run left aside."""
    by_url = min(use.last_url_at, use.last_call_at + clocks.url_use)
    by_command = min(use.last_command_end, use.last_call_at + clocks.background)
    return max(use.last_call_at, by_url, by_command)


def next_due(state: BoxState, state_since: float, use: Use, clocks: Clocks) -> Due | None:
    """What happens next to the box if nobody touches it, and when; None for states that no clock governs."""
    match state:
        case BoxState.READY:
            freeze_at = last_use(use, clocks) + clocks.freeze_after
            if use.commands_running or use.held:
                freeze_at = max(freeze_at, use.last_call_at + clocks.background)
            return Due("freeze", freeze_at)
        case BoxState.FROZEN:
            return Due("archive", max(last_use(use, clocks) + clocks.archive_after, state_since))
        case BoxState.ARCHIVED | BoxState.FAILED:
            return Due("delete", state_since + clocks.delete_after)
        case _:
            return None


def action_now(state: BoxState, state_since: float, use: Use, clocks: Clocks, now: float) -> Action | None:
    """The action whose time has come, if any."""
    due = next_due(state, state_since, use, clocks)
    return due.action if due and due.at <= now else None
