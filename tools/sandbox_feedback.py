"""sandbox_feedback: what an agent thinks of the product."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tools.context import Context
from tools.tool import BoxId, Input, Result, Tool

Words = Annotated[str, Field(min_length=1, max_length=8000)]


class Feedback(Input):
    task: Annotated[Words, Field(description="What you set out to do.")]
    usage: Annotated[Words, Field(description="How you used the boxes.")]
    problems: Annotated[Words, Field(description='What went wrong or cost time; "none" if nothing did.')]
    suggestions: Annotated[Words, Field(description="What would have helped.")]
    id: Annotated[BoxId | None, Field(description="The box that it is about, if it is about one.")] = None


async def run(context: Context, arguments: Feedback) -> Result:
    return Result(
        await context.words.feedback(
            task=arguments.task, usage=arguments.usage, problems=arguments.problems, suggestions=arguments.suggestions, box=arguments.id
        )
    )


tool = Tool(
    name="sandbox_feedback",
    title="Report how it went",
    description=(
        "Tell the people who run this service how the boxes served you: once per task, at its end, honestly. Errors you worked around, "
        "words you misread and missing tools are what they want to know. Returns JSON at once; needs no running box."
    ),
    input=Feedback,
    box_use="none",
    run=run,
    examples=(
        {
            "task": "Fix the checkout test",
            "usage": "One box, 14 commands, a dev server in the background",
            "problems": "none",
            "suggestions": "A shorter way to copy one file in",
        },
    ),
)
