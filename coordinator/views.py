"""What is told of boxes and commands, as JSON with the names of CONTRACT 3. Pure: records, the node's words and the time come in."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from coordinator.clock import iso
from coordinator.fleet import Whereabouts
from coordinator.store.boxes import BoxRecord
from coordinator.store.steps import Step
from node.protocol import BoxState, BoxView, CommandView, Hop, OutputView, Problem

INTERNAL = "node /work/.psbx-sync/"  # the client's own steps of an upload (CONTRACT 6)
NAME, GOAL, NOTE = 60, 500, 200  # code points kept


@dataclass(frozen=True)
class Shown:
    """A box's state as a person should read it."""

    status: BoxState
    view: BoxView | None = None
    problem: Problem | None = None


def cut(text: str, length: int) -> str:
    """As the client cuts names and goals when it looks for a lost start: line breaks and tabs are spaces, ends trimmed, then `length`."""
    flat = text.replace("\r", " ").replace("\n", " ").replace("\t", " ")
    return flat.strip()[:length].strip()


def is_internal(cmd: str) -> bool:
    return cmd.lstrip().startswith(INTERNAL)


def show(record: BoxRecord, where: Whereabouts | None, *, grace: float) -> Shown:
    """The one place that decides a box's state from the record, and from what is known of its node (None: not of the fleet)."""
    if record.stage != "live":
        problem = Problem.model_validate_json(record.problem) if record.problem else None
        return Shown(BoxState(record.stage), where.view if where else None, problem)
    return _show_live(record, where, grace)


def _show_live(record: BoxRecord, where: Whereabouts | None, grace: float) -> Shown:
    if where is None:
        return Shown(BoxState.UNREACHABLE, None, _lost("node_removed", "The node of this box was removed from the fleet"))
    if where.silent_for is not None:
        lost = where.silent_for > grace
        silence = f"Node {record.node} has not been heard of for {where.silent_for:.0f} s"
        return Shown(BoxState.UNREACHABLE, where.view, _lost("node_lost" if lost else "node_unreachable", silence))
    if where.view:
        return Shown(where.view.state, where.view, where.view.problem)
    if where.heard:
        return Shown(BoxState.FAILED, None, _lost("box_gone", f"Node {record.node} no longer has this box"))
    return Shown(BoxState(record.node_state or BoxState.READY), None)


def _lost(code: str, message: str) -> Problem:
    return Problem(code=code, message=message, remedy="Wait for the operator to bring the node back, or start a new box.", hop=Hop.NODE)


def box_json(record: BoxRecord, shown: Shown, agent: dict[str, Any]) -> dict[str, Any]:
    """A box in a list."""
    told: dict[str, Any] = {
        "id": record.id,
        "name": record.name,
        "goal": record.goal,
        "status": shown.status.value,
        "createdAt": iso(record.created_at),
        "flavour": record.flavour,
        "size": record.size,
        "agent": agent,
    }
    if record.said and record.said_at:
        told["said"] = {"text": record.said, "at": iso(record.said_at)}
    if shown.problem:
        told["problem"] = shown.problem.model_dump(mode="json", exclude_defaults=True)
    return told


def status_json(record: BoxRecord, shown: Shown, agent: dict[str, Any], steps: list[Step]) -> dict[str, Any]:
    """The whole view of a box."""
    told = box_json(record, shown, agent) | {"node": record.node}
    if view := shown.view:
        stops_at = view.deletes_at if view.state == BoxState.ARCHIVED else view.archives_at
        told |= {
            "stateSince": iso(view.state_since),
            "lastUsedAt": iso(view.last_used_at),
            "freezesAt": _iso(view.freezes_at),
            "stopsAt": _iso(stops_at),
            "runningCommands": view.running_commands,
            "cameBackCold": view.cold,
            "traffic": {"sentBytes": view.sent_bytes, "receivedBytes": view.received_bytes},
            "health": _health(view),
        }
    return told | {"steps": [step_json(step) for step in steps]}


def _health(view: BoxView) -> dict[str, Any] | None:
    if view.guest is None:
        return None
    return view.guest.wire() | {"checkedAt": iso(view.guest.checked_at)}


def step_json(step: Step) -> dict[str, Any]:
    told = {
        "at": iso(step.at),
        "tool": step.tool,
        "cmd": step.cmd,
        "dir": step.dir,
        "note": step.note,
        "execId": step.exec_id,
        "exitCode": step.exit_code,
        "signal": step.signal,
        "timedOut": bool(step.timed_out) or None,
        "error": step.error,
    }
    return {name: value for name, value in told.items() if value is not None}


def command_json(view: CommandView) -> dict[str, Any]:
    """A command, with the end of its output where the node told it."""
    told: dict[str, Any] = {
        "execId": view.exec_id,
        "cmd": view.cmd,
        "cwd": view.cwd,
        "user": view.user,
        "foreground": not view.background,
        "running": view.running,
        "pid": view.pid,
        "startedAt": iso(view.started_at),
        "endedAt": _iso(view.ended_at),
        "cpu": round(view.cpu_seconds, 3),
    }
    return told | ending_json(view)


def ending_json(view: CommandView) -> dict[str, Any]:
    """How a command ended, and the end of what it said. A cut is never silent (report 2): `truncated`, and how many bytes there were."""
    told: dict[str, Any] = {"exitCode": view.exit_code, "signal": view.signal, "timedOut": view.timed_out}
    if view.end_reason not in {None, "exited", "signal"}:
        told["endReason"] = view.end_reason
    streams = {name: output for name, output in (("stdout", view.stdout), ("stderr", view.stderr)) if output is not None}
    if not streams:
        return told
    for name, output in streams.items():
        told |= output_json(name, output, running=view.running)
    return told | {"truncated": any(output.truncated for output in streams.values())}


def output_json(name: str, output: OutputView, *, running: bool) -> dict[str, Any]:
    """One stream: text, and its exact bytes beside it where they are no UTF-8 (report 10)."""
    data = base64.b64decode(output.text_b64)
    text, exact = decode(data, cut_before=output.truncated, more_to_come=running)
    told: dict[str, Any] = {name: text}
    if not exact:
        told[f"{name}Base64"] = output.text_b64
    if output.truncated:
        told |= {f"{name}Truncated": True, f"{name}Bytes": output.total}
    if output.dropped:
        told[f"{name}DroppedBytes"] = output.dropped
    return told


def decode(data: bytes, *, cut_before: bool, more_to_come: bool) -> tuple[str, bool]:
    """The bytes as text, and whether the text says all of them. A character cut in two by our own window is left out, not called binary."""
    if cut_before:
        rest_of_one = len(data) if len(data) < 4 else 0  # four bytes without a first one are no character of UTF-8
        start = next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), rest_of_one)
        data = data[start:]
    try:
        return data.decode(), True
    except UnicodeDecodeError as error:
        if more_to_come and error.reason == "unexpected end of data" and error.end == len(data):
            return data[: error.start].decode(), True
        return data.decode(errors="replace"), False


def _iso(at: float | None) -> str | None:
    return None if at is None else iso(at)
