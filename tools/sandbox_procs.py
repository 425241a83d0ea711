"""sandbox_procs: the commands of a box: list them, wait for one, stop them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tools.context import Context, ToolError
from tools.tool import BoxId, Input, Result, Tool


class Procs(Input):
    id: BoxId
    action: Annotated[Literal["list", "wait", "stop"], Field(description="What to do; list needs nothing else.")] = "list"
    bg_id: Annotated[
        str | None, Field(max_length=64, description="The command: bgId of a background command, or execId of any sandbox_exec.")
    ] = None
    all: Annotated[bool, Field(description="With stop: every running command of the box.")] = False
    until: Annotated[
        Literal["exited", "ready"] | None,
        Field(description='With wait: "exited" (default), or "ready": readyPort accepts connections or readyLog was printed.'),
    ] = None
    ready_port: Annotated[int | None, Field(ge=1, le=65535, description="A TCP port in the box that the command will listen on.")] = None
    ready_log: Annotated[
        str | None, Field(min_length=1, max_length=500, description="A text that the command prints when it is ready.")
    ] = None
    wait_sec: Annotated[
        float | None,
        Field(ge=0, le=1800, description="How long to wait; default and upper limit: what your client survives (25 s if it does not say)."),
    ] = None


async def run(context: Context, arguments: Procs) -> Result:
    return Result(await ACTIONS[arguments.action](context, arguments))


async def _list(context: Context, arguments: Procs) -> dict[str, Any]:
    return {"commands": list(await context.boxes.commands(arguments.id))}


async def _wait(context: Context, arguments: Procs) -> dict[str, Any]:
    bg_id = _named(arguments)
    until = arguments.until or ("ready" if arguments.ready_port or arguments.ready_log else "exited")
    if until == "ready" and not (arguments.ready_port or arguments.ready_log):
        raise ToolError("bad_request", "readyPort or readyLog is required", remedy="Say what shows that the command is ready.", hop="agent")
    limit = context.caller.wait_sec
    await context.progress(f"waiting for {bg_id} until {until}")
    return await context.boxes.wait_command(
        arguments.id,
        bg_id,
        wait_sec=limit if arguments.wait_sec is None else min(arguments.wait_sec, limit),
        until=until,
        ready_port=arguments.ready_port,
        ready_log=arguments.ready_log,
    )


async def _stop(context: Context, arguments: Procs) -> dict[str, Any]:
    if not arguments.all:
        return await context.boxes.stop_command(arguments.id, _named(arguments))
    running = [command for command in await context.boxes.commands(arguments.id) if command.get("running")]
    return {"stopped": [await context.boxes.stop_command(arguments.id, command["execId"]) for command in running]}


def _named(arguments: Procs) -> str:
    if arguments.bg_id is None:
        raise ToolError(
            "bad_request", f"bgId is required to {arguments.action}", remedy="Name the command by its bgId or execId.", hop="agent"
        )
    return arguments.bg_id


ACTIONS = {"list": _list, "wait": _wait, "stop": _stop}

tool = Tool(
    name="sandbox_procs",
    title="Follow the commands of a box",
    description=(
        "The commands that sandbox_exec started in a box, running and ended. Use it to follow background commands, to fetch a result "
        "that did not arrive, and to stop things.\n"
        "action list: JSON {commands: [{execId, cmd, running, exitCode, pid, cpu, mine, foreground, ...}]}, at once.\n"
        "action wait with bgId: returns when the command has ended (exitCode and the end of its output) or, with readyPort or readyLog, "
        "as soon as a server is ready; after waitSec it returns all the same with running true: call again. Better than sleeping in a "
        "loop.\n"
        "action stop with bgId (or all: true): ends the whole process group, SIGTERM and then SIGKILL; a few seconds. Use it instead of "
        "pkill or killall, which may hit what the box itself needs."
    ),
    input=Procs,
    box_use="wake",
    run=run,
    resumable=True,
    examples=(
        {"id": "k3v9x0q2m7ab", "action": "wait", "bgId": "9f2c41d07be35a68", "readyPort": 3000},
        {"id": "k3v9x0q2m7ab", "action": "stop", "bgId": "9f2c41d07be35a68"},
    ),
)
