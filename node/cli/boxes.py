"""`boxctl box ...`.

Looking, running and freezing is asked of this host's node; starting and ending of the coordinator, which owns what boxes are for.
"""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli import show
from node.cli.api import Api
from node.cli.coordinator import Coordinator
from node.cli.failure import NotFound, WrongUsage
from node.config import Places

app = typer.Typer(no_args_is_help=True, help="Boxes on this host: list, use, freeze, stop.")


def complete_box(incomplete: str) -> list[str]:
    try:
        boxes = node().ask("GET", "/v1/boxes", timeout=2)["boxes"]
    except Exception:  # a shell that completes shows no errors
        return []
    return [word for box in boxes for word in (box["id"], box["name"]) if word and word.startswith(incomplete)]


Box = Annotated[str, typer.Argument(metavar="BOX", help="Id, the beginning of one, or a name.", autocompletion=complete_box)]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
User = Annotated[str, typer.Option(help="Who runs it in the box.")]
Cwd = Annotated[str, typer.Option(help="Where it runs.")]


def node() -> Api:
    return Api.on_socket("node", Places.from_environment().node_socket)


def find_box(reference: str, boxes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The box of that id, else the only one whose id begins so, else the only one of that name.

    Raises NotFound for none, WrongUsage for several."""
    if exact := [box for box in boxes if box["id"] == reference]:
        return exact[0]
    found = [box for box in boxes if reference and box["id"].startswith(reference)] or [box for box in boxes if box["name"] == reference]
    if not found:
        raise NotFound(f"there is no box {reference!r} on this host", remedy="See which there are: `boxctl box list`.")
    if len(found) > 1:
        names = ", ".join(f"{box['id']} ({box['name'] or 'no name'})" for box in found[:8])
        raise WrongUsage(f"{reference!r} could be {len(found)} boxes", cause=names, remedy="Give more of the id.")
    return found[0]


def resolve(api: Api, reference: str) -> str:
    return str(find_box(reference, api.ask("GET", "/v1/boxes")["boxes"])["id"])


def box_table(boxes: Sequence[Mapping[str, Any]]) -> None:
    show.print_table(("ID", "NAME", "STATE", "FLAVOUR", "SIZE", "SINCE", "NEXT"), map(_row, boxes))


@app.command("list")
def list_boxes(json: Json = False) -> None:
    """The boxes of this host."""
    boxes = node().ask("GET", "/v1/boxes")["boxes"]
    if json:
        show.print_json(boxes)
    elif boxes:
        box_table(boxes)
    else:
        show.say("no boxes; an agent starts one, or you: `boxctl box start --name trial`")


@app.command("show")
def show_box(box: Box, json: Json = False) -> None:
    """Everything that is known about one box; never wakes it."""
    api = node()
    view = api.ask("GET", f"/v1/boxes/{resolve(api, box)}")
    if json:
        show.print_json(view)
        return
    guest, problem = view.get("guest") or {}, view.get("problem") or {}
    show.print_fields(
        (
            ("id", view["id"]),
            ("name", view["name"]),
            ("state", view["state"] + (" (came back cold: processes of before are gone)" if view.get("cold") else "")),
            ("since", show.ago(view["stateSince"])),
            ("next", _next(view)),
            ("image", f"{view['flavour']} {view['image'][:19]}"),
            ("size", view["size"]),
            ("created", show.ago(view["createdAt"])),
            ("last used", show.ago(view["lastUsedAt"])),
            ("generation", view["generation"]),
            ("running commands", view["runningCommands"]),
            ("sent", show.size(view["sentBytes"])),
            ("received", show.size(view["receivedBytes"])),
            ("qemu", view.get("pid")),
            ("guest", f"desktop {guest['desktop']}, docker {guest['docker']}, load {guest['load']:.1f}" if guest else ""),
            ("memory free", show.size(guest.get("memoryAvailable"))),
            ("/work free", show.size(guest.get("workFree"))),
            ("problem", problem.get("message")),
            ("what to do", problem.get("remedy")),
        )
    )


@app.command()
def start(
    name: Annotated[str, typer.Option(help="What you call it.")],
    goal: Annotated[str, typer.Option(help="What it is for.")] = "started by the operator",
    flavour: Annotated[str | None, typer.Option(help="core or full; default: what the coordinator chooses.")] = None,
    size: Annotated[int, typer.Option(help="1, 2 or 4 units.")] = 1,
    json: Json = False,
) -> None:
    """Start a box."""
    if size not in (1, 2, 4):
        raise WrongUsage(f"--size is 1, 2 or 4, not {size}")
    with show.progress("starting") as report:
        box = Coordinator.with_local_key(Places.from_environment()).start_box(name, goal, flavour, size, report)
    if json:
        show.print_json(box)
    else:
        show.out().print(box["id"], markup=False)


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    box: Box,
    command: Annotated[list[str], typer.Argument(help="One word is a bash line; several are a program and its arguments.")],
    cwd: Cwd = "/work",
    user: User = "root",
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running; prints its execId for `box logs`.")] = False,
) -> None:
    """Run a command in a box with our stdin, stdout and stderr. Wakes it. Ends with the command's own exit code."""
    api, line, variables = node(), command_line(command), parse_env(env or [])
    found = resolve(api, box)
    if detach:
        body = {"execId": f"boxctl-{secrets.token_hex(6)}", "cmd": line, "cwd": cwd, "user": user, "env": variables, "background": True}
        with show.progress("exec") as report:
            started = api.operate("POST", f"/v1/boxes/{found}/exec", {**body, "waitSec": 0}, report=report)
        show.out().print(started["execId"], markup=False)
        return
    import trio

    from node.cli.terminal import run_command
    from node.protocol import AttachBox

    spec = AttachBox(cmd=line, cwd=cwd, user=user, env=variables)
    raise typer.Exit(trio.run(run_command, Places.from_environment().node_socket, found, spec))


@app.command()
def shell(box: Box, user: User = "root", cwd: Cwd = "/work") -> None:
    """An interactive shell in a box, on this terminal. Wakes it."""
    import os

    import trio

    from node.cli.terminal import run_shell
    from node.protocol import AttachBox

    spec = AttachBox(cmd="exec bash -l", cwd=cwd, user=user, env={"TERM": os.environ.get("TERM", "xterm-256color")}, tty=True)
    raise typer.Exit(trio.run(run_shell, Places.from_environment().node_socket, resolve(node(), box), spec))


@app.command("cp")
def copy(source: Annotated[str, typer.Argument()], target: Annotated[str, typer.Argument()]) -> None:
    """Copy a file or folder into a box (`file box:/path`) or out of it (`box:/path file`). Keeps modes and links."""
    import trio

    from node.cli.copying import copy_in, copy_out, split_place

    (source_box, source_path), (target_box, target_path) = split_place(source), split_place(target)
    reference = source_box or target_box
    if not reference or (source_box and target_box):
        raise WrongUsage("one of the two must be BOX:PATH, the other one a path here", remedy="`boxctl box cp notes.txt mybox:/work/`")
    socket, box = Places.from_environment().node_socket, resolve(node(), reference)
    with show.progress("copying") as report:
        copied = 0

        def counted(size: int) -> None:
            nonlocal copied
            copied += size
            if sys.stderr.isatty():
                report(show.size(copied), None)

        if target_box:
            done = trio.run(partial(copy_in, socket, box, Path(source_path), target_path, counted))
        else:
            done = trio.run(partial(copy_out, socket, box, source_path, Path(target_path), counted))
    show.say(f"copied {done.files} file{'s' * (done.files != 1)}, {show.size(copied)}, to {done.target}")


@app.command()
def freeze(box: Box, json: Json = False) -> None:
    """Freeze a box: memory and processes stay, CPU and memory of the host are free."""
    _change("freeze", box, json)


@app.command()
def thaw(box: Box, json: Json = False) -> None:
    """Thaw a frozen box: it goes on where it was."""
    _change("thaw", box, json)


@app.command()
def stop(box: Box, json: Json = False) -> None:
    """Stop a box: its disk is archived and can be restored, its processes end."""
    _end(box, delete=False, json=json)


@app.command("rm")
def remove(box: Box, json: Json = False) -> None:
    """Delete a box with its disk. There is no way back."""
    _end(box, delete=True, json=json)


@app.command()
def logs(
    box: Box,
    exec_id: Annotated[str | None, typer.Argument(metavar="EXECID", help="Without one: the commands of the box.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the command ends.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Its stderr instead of its stdout.")] = False,
    json: Json = False,
) -> None:
    """What commands ran in a box, or all the output of one. Wakes it."""
    api = node()
    found = resolve(api, box)
    if exec_id is not None:
        stream = "stderr" if stderr else "stdout"
        _pour(api.read(f"/v1/boxes/{found}/commands/{exec_id}/output/{stream}", offset=0, follow=int(follow)))
        return
    commands = api.ask("GET", f"/v1/boxes/{found}/commands")["commands"]
    if json:
        show.print_json(commands)
    else:
        rows = ((c["execId"], show.ago(c["startedAt"]), _end_of(c), _short(c["cmd"])) for c in commands)
        show.print_table(("EXECID", "STARTED", "END", "COMMAND"), rows)


@app.command()
def console(box: Box) -> None:
    """The box's serial log: what its kernel and systemd said. Never wakes it."""
    api = node()
    _pour(api.read(f"/v1/boxes/{resolve(api, box)}/console"))


def command_line(words: Sequence[str]) -> str:
    """One word is a line for bash, as with ssh; several are a program and its arguments, quoted. A `--` before them is not theirs."""
    words = words[1:] if words[0] == "--" else words
    if not words:
        raise WrongUsage("there is no command", remedy="`boxctl box exec BOX -- ls -l`")
    return words[0] if len(words) == 1 else shlex.join(words)


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    bad = next((pair for pair in pairs if not pair.partition("=")[0] or "=" not in pair), None)
    if bad is not None:
        raise WrongUsage(f"--env takes NAME=VALUE, not {bad!r}")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _change(change: str, reference: str, json: bool) -> None:
    api = node()
    box = resolve(api, reference)
    with show.progress(change) as report:
        view = api.operate("POST", f"/v1/boxes/{box}/{change}", report=report)
    if json:
        show.print_json(view)
    else:
        show.say(f"{view['id']} is {view['state']}")


def _end(reference: str, *, delete: bool, json: bool) -> None:
    places = Places.from_environment()
    box = resolve(node(), reference)
    with show.progress("deleting" if delete else "stopping") as report:
        answer = Coordinator.with_local_key(places).stop_box(box, delete, report)
    if json:
        show.print_json(answer)
    else:
        show.say(f"{box} is {'deleted' if delete else 'stopped; its disk is kept'}")


def _pour(chunks: Any) -> None:
    """Bytes of a guest to stdout: as they are for a program, without what could steer it for a terminal."""
    terminal = sys.stdout.isatty()
    for chunk in chunks:
        data = show.printable(chunk.decode(errors="replace")).encode() if terminal else chunk
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _row(box: Mapping[str, Any]) -> tuple[object, ...]:
    return box["id"], box["name"], box["state"], box["flavour"], box["size"], show.ago(box["stateSince"]), _next(box)


def _next(box: Mapping[str, Any]) -> str:
    clocks = (("freezes", "freezesAt"), ("archived", "archivesAt"), ("deleted", "deletesAt"))
    return next((f"{what} {show.ago(box[key])}" for what, key in clocks if box.get(key)), "")


def _end_of(command: Mapping[str, Any]) -> str:
    if command["running"]:
        return "running"
    return f"exit {command['exitCode']}" if command["exitCode"] is not None else str(command["signal"] or command["endReason"] or "")


def _short(text: str) -> str:
    line = text.replace("\n", " ")
    return line if len(line) <= 60 else line[:59] + "…"
