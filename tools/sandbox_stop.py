"""sandbox_stop: the end of a box."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tools.context import Context
from tools.tool import BoxId, Input, Result, Tool


class Stop(Input):
    id: BoxId
    delete: Annotated[bool, Field(description="Delete the box and its /work for ever instead of archiving it.")] = False


async def run(context: Context, arguments: Stop) -> Result:
    return Result(await context.boxes.stop(arguments.id, delete=arguments.delete))


tool = Tool(
    name="sandbox_stop",
    title="Stop a box",
    description=(
        "End a box when its task is done; do not leave boxes behind. Its processes end; its disk with /work is archived for 30 days and "
        "comes back with sandbox_start {restore: id}. With delete: true everything is gone at once, for ever.\n"
        "Returns JSON {id, status, unsavedWork, ...} within seconds. unsavedWork names repositories with changes that are not committed "
        "or not pushed: look at it before you delete. Stopping again within 10 minutes gives the first answer."
    ),
    input=Stop,
    box_use="observe",
    run=run,
    destructive=True,
    idempotent=True,
    resumable=True,
    examples=({"id": "k3v9x0q2m7ab"},),
)
