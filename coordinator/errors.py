"""The coordinator's errors. All of them are ToolErrors, so a tool, a REST answer and a log line tell the same story:

    ToolError                  code, message, cause, remedy, hop
     └── CoordinatorError
          ├── BadInput         the caller's; names the field and the fix
          ├── Unauthorised     no key, or not one of ours
          ├── BoxNotFound      no such box in the caller's account
          ├── BoxGone          deleted, or its node no longer has it (report 68: never an empty one in its place)
          ├── CommandNotFound  "bgId not found"
          ├── NoCapacity       no room, with figures (report 71); sandbox_start adds the client's "503 no box capacity right now"
          ├── ImageMissing     no node has the flavour
          ├── NodeUnreachable  the box's node is silent; said at once (report 63)
          └── NodeProblem      what a node answered, passed on with its own code and hop
"""

from __future__ import annotations

from typing import Any

from node.protocol import Hop, Problem
from tools.context import ToolError


class CoordinatorError(ToolError):
    """`code` is stable and documented in docs/errors.md; `status` is the HTTP status that carries it over REST."""

    default_code = "coordinator_error"
    status = 500
    default_hop = Hop.COORDINATOR
    default_remedy = "Read the coordinator's log."

    def __init__(self, message: str, *, cause: str = "", remedy: str | None = None) -> None:
        remedy = self.default_remedy if remedy is None else remedy
        super().__init__(self.default_code, message, cause=cause, remedy=remedy, hop=self.default_hop.value)


class BadInput(CoordinatorError):
    default_code = "bad_request"
    status = 400
    default_hop = Hop.AGENT
    default_remedy = "Correct the named field and call again."


class Unauthorised(CoordinatorError):
    default_code = "unauthorised"
    status = 401
    default_hop = Hop.AGENT
    default_remedy = "Send `Authorization: Bearer psbx_...`; `boxctl key create` makes a key."


class BoxNotFound(CoordinatorError):
    default_code = "box_not_found"
    status = 404
    default_hop = Hop.AGENT
    default_remedy = "List the boxes to see which exist."


class BoxGone(CoordinatorError):
    default_code = "box_gone"
    status = 410
    default_remedy = "Start a new box; this one's files are gone."


class CommandNotFound(CoordinatorError):
    default_code = "command_not_found"
    status = 404
    default_hop = Hop.AGENT
    default_remedy = "List the box's commands to see which exist."


class NoCapacity(CoordinatorError):
    default_code = "no_capacity"
    status = 503
    default_remedy = "Come back in about 5 minutes, stop or freeze a box, or pass waitForCapacitySec."


class ImageMissing(CoordinatorError):
    default_code = "image_missing"
    status = 409
    default_remedy = "Ask for another flavour, or have the operator build it: `boxctl image build <flavour>`."


class NodeUnreachable(CoordinatorError):
    default_code = "node_unreachable"
    status = 503
    default_hop = Hop.NODE
    default_remedy = "The box is kept; call again in a minute. If it lasts, the operator should look at the node."


class NodeProblem(CoordinatorError):
    """What a node answered, with the node's own code, words and hop."""

    def __init__(self, problem: Problem, status: int | None = None) -> None:
        ToolError.__init__(
            self, problem.code, problem.message, cause=problem.cause, remedy=problem.remedy, hop=problem.hop.value
        )
        self.status = status or STATUS_OF_CODE.get(problem.code, 502)


STATUS_OF_CODE = {
    "bad_request": 400,
    "box_not_found": 404,
    "command_not_found": 404,
    "box_conflict": 409,
    "image_missing": 409,
    "no_capacity": 503,
    "guest_timeout": 504,
}


def as_json(error: ToolError) -> dict[str, Any]:
    """The body of every failed REST answer: `error` is a text (CONTRACT 2.4), the parts stand beside it."""
    parts = {"code": error.code, "cause": error.cause, "remedy": error.remedy, "hop": error.hop}
    return {"error": error.message, **{name: value for name, value in parts.items() if value}}


def as_problem(error: ToolError) -> Problem:
    return Problem(code=error.code, message=error.message, cause=error.cause, remedy=error.remedy, hop=Hop(error.hop))
