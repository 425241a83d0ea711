"""sandbox_list: every box of the account."""

from __future__ import annotations

from tools.context import Context
from tools.tool import Input, Result, Tool


class List(Input):
    pass


async def run(context: Context, _: List) -> Result:
    return Result({"boxes": await context.boxes.list()})


tool = Tool(
    name="sandbox_list",
    title="List boxes",
    description=(
        "All boxes of this account, newest first, as JSON {boxes: [{id, name, goal, status, createdAt, agent: {state, thisConversation}, "
        "...}]}. Use it when you lost an id, when a start's answer did not arrive, or to see what is left running. A box appears from "
        "the moment its start begins. agent tells who holds a box: thisConversation true means you; if another agent is working or away, "
        "ask the person before you touch its box.\n"
        "Answers at once and never wakes a frozen box."
    ),
    input=List,
    box_use="none",
    run=run,
    read_only=True,
    idempotent=True,
    resumable=True,
    examples=({},),
)
