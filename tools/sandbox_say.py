"""sandbox_say: a status line for the person watching."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tools.context import Context
from tools.tool import BoxId, Input, Result, Tool, one_line


class Say(Input):
    id: BoxId
    text: Annotated[str, Field(description="One sentence, kept up to 500 characters."), one_line(500)]


async def run(context: Context, arguments: Say) -> Result:
    return Result(await context.boxes.say(arguments.id, arguments.text))


tool = Tool(
    name="sandbox_say",
    title="Tell the person what you are doing",
    description=(
        'Show a status line beside the box for the person who watches, like "Tests pass, now checking the login page". Use it at turning '
        "points of longer work. It is not a question: nobody is asked and nothing is waited for. Returns JSON at once and does not wake "
        "a frozen box."
    ),
    input=Say,
    box_use="observe",
    run=run,
    examples=({"id": "k3v9x0q2m7ab", "text": "The bug is reproduced; fixing it now"},),
)
