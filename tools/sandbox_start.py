"""sandbox_start: a new box, or an archived one again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tools.context import Context, ToolError
from tools.tool import BoxId, Input, Result, Tool, one_line

NO_CAPACITY = "503 no box capacity right now"


class Start(Input):
    model_config = ConfigDict(json_schema_extra={"required": ["goal"]})  # an archived box has a goal already, so restore does without

    goal: Annotated[
        str, Field(description="What this box is for, in a sentence a person understands (kept up to 500 characters)."), one_line(500)
    ] = ""
    name: Annotated[
        str, Field(description="A short name for lists, up to 60 characters; default: the goal's beginning."), one_line(60, empty=True)
    ] = ""
    size: Annotated[
        Literal[1, 2, 4], Field(description="1 = 2 CPUs, 8 GB RAM, 40 GB disk (smaller on a small host); 2 and 4 multiply that.")
    ] = 1
    flavour: Annotated[
        str | None,
        Field(
            max_length=32,
            description='"full": Docker, Chromium, Node, Go, Python, PHP, ffmpeg. "core": Python, Node, git, a desktop.',
        ),
    ] = None
    wait_for_capacity_sec: Annotated[
        float,
        Field(
            ge=0,
            le=1800,
            description="If the hosts are full, wait so long for room instead of failing at once; never longer than your client can wait.",
        ),
    ] = 0
    restore: Annotated[
        BoxId | None,
        Field(description="Id of an archived box to bring back instead of making a new one: it boots from its disk, /work is as it was."),
    ] = None


async def run(context: Context, arguments: Start) -> Result:
    if not (arguments.goal or arguments.restore):
        raise ToolError("bad_request", "goal is required", remedy="Say in a sentence what the box is for.", hop="agent")
    name = arguments.name or ("" if arguments.restore else arguments.goal[:60].strip())  # a restored box keeps its own
    await context.progress(f"starting box '{name or arguments.restore}'")
    try:
        box = await context.boxes.start(
            name=name,
            goal=arguments.goal,
            size=arguments.size,
            flavour=arguments.flavour,
            wait_for_capacity_sec=min(arguments.wait_for_capacity_sec, context.caller.wait_sec),
            restore=arguments.restore,
        )
    except ToolError as error:
        if error.code != "no_capacity" or error.message.startswith(NO_CAPACITY):
            raise
        # The client knows this failure by these words; the number must stay in the text and out of every status (CONTRACT 0.5).
        raise ToolError(
            error.code,
            f"{NO_CAPACITY}: {error.message}",
            cause=error.cause,
            remedy="Come back in about 5 minutes, stop a box you no longer need, or pass waitForCapacitySec.",
            hop=error.hop,
        ) from error
    return Result(box)


tool = Tool(
    name="sandbox_start",
    title="Start a box",
    description=(
        "Get a computer of your own: a Linux microVM (Debian 13, root, internet if its host has it, a /work folder for the code, a virtual "
        "display :99). Use it whenever work should not run on the person's machine: building, testing, servers, with the full image "
        "containers and browsers too. Call it once per task and keep the id; for another task start another box.\n"
        "Returns when the box is ready, as JSON {id, name, goal, status, ...}; usually within a few seconds, a minute when the host "
        "must prepare first (progress messages tell). Then run commands with sandbox_exec.\n"
        "A box that is not used for 10 minutes is frozen by itself, with its memory and processes, and wakes at the next call in under a "
        "second: do not start a new one instead. Repeating a start with the same name and goal within a minute gives the same box "
        '(reused: true), so a lost answer may simply be asked again. When no host has room the error says "503 no box capacity right '
        'now": come back in about 5 minutes.'
    ),
    input=Start,
    box_use="wake",
    run=run,
    idempotent=True,
    resumable=True,
    examples=({"name": "checkout-bug", "goal": "Reproduce and fix the failing checkout test"},),
)
