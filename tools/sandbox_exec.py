"""sandbox_exec: run a command in a box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from tools.context import Context
from tools.tool import BoxId, Input, Result, Tool, WorkPath, one_line

DEFAULT_TIMEOUT_SEC = 1800.0
CMD_LIMIT = 256 * 1024  # bytes
ENV_LIMIT = 120 * 1024  # bytes of all names and values; the kernel takes 128 KiB of one


def startable(cmd: str) -> str:
    if "\0" in cmd:
        raise ValueError("must not contain NUL")
    if len(cmd.encode()) > CMD_LIMIT:
        raise ValueError(f"has more than {CMD_LIMIT >> 10} KiB: put it into a file of the box, piece by piece, and run that")
    return cmd


def settable(env: Mapping[str, str]) -> Mapping[str, str]:
    if any(not name or "=" in name or "\0" in name + value for name, value in env.items()):
        raise ValueError("needs names without '=', and no NUL")
    if sum(len(text.encode()) for pair in env.items() for text in pair) > ENV_LIMIT:
        raise ValueError(f"has more than {ENV_LIMIT >> 10} KiB: put what is long into a file of the box")
    return env


class Exec(Input):
    id: BoxId
    cmd: Annotated[
        str,
        Field(
            min_length=1,
            max_length=CMD_LIMIT,
            description="A bash command line; several lines are fine. There is no terminal, and stdin is empty.",
        ),
        AfterValidator(startable),
    ]
    note: Annotated[
        str,
        Field(
            description='Why you run it, in a few words for the person watching, like "run the unit tests" (kept up to 200 characters).',
        ),
        one_line(200),
    ]
    cwd: Annotated[WorkPath, Field(description="Where to run it: absolute, or relative to /work.")] = "/work"
    timeout_sec: Annotated[
        float | None,
        Field(
            gt=0,
            le=3600,
            description="Stops the command and its children after so long. Default 1800, at most 3600; in the background, none.",
        ),
    ] = None
    background: Annotated[
        bool,
        Field(description="Start it and return at once with a bgId: for servers, watchers, long builds. Follow it with sandbox_procs."),
    ] = False
    exec_id: Annotated[
        str | None,
        Field(
            pattern=r"^[A-Za-z0-9_-]{1,64}$",
            description="Your own name for this run, so that you can fetch a lost result. The same execId never runs twice.",
        ),
    ] = None
    user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,31}$", description='"root", or "tester" for an ordinary account.')] = "root"
    env: Annotated[dict[str, str], Field(description="More environment variables for this command."), AfterValidator(settable)] = Field(
        default_factory=dict
    )


async def run(context: Context, arguments: Exec) -> Result:
    # Derived from the call, so that a call taken up after a restart finds its command instead of running it twice.
    exec_id = arguments.exec_id or context.caller.call[:16] or None
    timeout_sec = arguments.timeout_sec if arguments.timeout_sec or arguments.background else DEFAULT_TIMEOUT_SEC
    await context.progress(f"running: {arguments.note}" + (f" (execId {exec_id})" if exec_id else ""))
    return Result(
        await context.boxes.exec(
            arguments.id,
            cmd=arguments.cmd,
            note=arguments.note,
            cwd=arguments.cwd,
            user=arguments.user,
            env=arguments.env,
            timeout_sec=timeout_sec,
            background=arguments.background,
            exec_id=exec_id,
        )
    )


tool = Tool(
    name="sandbox_exec",
    title="Run a command in a box",
    description=(
        "Run a bash command in a box and wait for its end. A frozen box is woken first (under a second). Root by default, in /work, UTC, "
        "DISPLAY=:99, internet access; no terminal, so use non-interactive flags.\n"
        "Returns JSON {execId, exitCode, signal, timedOut, stdout, stderr, truncated, outputUrl, fromHuman, ...}. A command that fails "
        "is a normal result with its exitCode: read it. stdout and stderr are the last 16 KB each; with truncated true the whole output "
        "is at outputUrl (plain GET). fromHuman holds words of the person watching: follow them.\n"
        "The call takes as long as the command. If the connection breaks, the command keeps running: fetch its result with sandbox_procs "
        '{action: "wait", bgId: <execId>}. Whatever should outlive the call (a server, a watcher, anything over some minutes) belongs in '
        "the background: true, which answers at once with {bgId, pid, log}; do not use &, nohup or screen, and stop such a command with "
        "sandbox_procs, not with pkill."
    ),
    input=Exec,
    box_use="wake",
    run=run,
    destructive=True,
    resumable=True,
    examples=(
        {"id": "k3v9x0q2m7ab", "cmd": "npm ci && npm test", "note": "run the unit tests", "cwd": "app"},
        {"id": "k3v9x0q2m7ab", "cmd": "npm run dev", "note": "start the dev server", "background": True},
    ),
)
