"""sandbox_status: one box in full."""

from __future__ import annotations

from tools.context import Context
from tools.tool import BoxId, Input, Result, Tool


class Status(Input):
    id: BoxId


async def run(context: Context, arguments: Status) -> Result:
    return Result(await context.boxes.status(arguments.id))


tool = Tool(
    name="sandbox_status",
    title="Look at a box",
    description=(
        "Everything about one box as JSON: its state (starting, ready, frozen, archived, failed, unreachable, stopped), the health of "
        "the system inside, goal, the last 30 steps (command, note, exit code; no output), who holds it, when it will be frozen or "
        "stopped, and messages from the person (fromHuman: read and follow them).\n"
        "Use it when a call failed and you want to know why, or to pick up work of before. Answers at once and never wakes a frozen box; "
        "there is no need to poll: every other tool wakes the box by itself."
    ),
    input=Status,
    box_use="observe",
    run=run,
    read_only=True,
    idempotent=True,
    resumable=True,
    examples=({"id": "k3v9x0q2m7ab"},),
)
