"""What can go wrong in boxctl, one tree; every leaf has an exit code of its own:

    Failure            1   it was tried and failed
     ├── WrongUsage    2   the words given make no sense together
     ├── NotRunning    3   the daemon that was asked is not there
     └── NotFound      4   no such box, key, node, image or command
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Failure(Exception):
    """`str(error)` says what failed; `cause` why, `remedy` what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, cause: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.cause, self.remedy = cause, remedy


class WrongUsage(Failure):
    exit_code = 2


class NotRunning(Failure):
    exit_code = 3


class NotFound(Failure):
    exit_code = 4


def from_problem(problem: Mapping[str, Any]) -> Failure:
    """A daemon's typed error (node.protocol.Problem in its wire form) as ours."""
    code = str(problem.get("code", "unknown"))
    kind = NotFound if code.endswith("_not_found") else Failure
    message = str(problem.get("message") or code)
    where = f"{code} at the {problem.get('hop') or 'node'}"
    cause = f"{problem['cause']}, {where}" if problem.get("cause") else where
    return kind(message, cause=cause, remedy=str(problem.get("remedy") or ""))


def as_failure(error: BaseException) -> Failure:
    """Any error as words for a person: trio's groups are opened, typed errors keep their remedy, a defect is named as one."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, Failure):
        return error
    if problem := getattr(error, "problem", None):  # NodeError and its kin of the image: {code, message, cause, remedy}
        return from_problem(problem.wire())
    if isinstance(error, PermissionError):
        return Failure(f"not permitted: {error.filename or error}", remedy="boxctl runs as root: `sudo boxctl ...`.")
    if isinstance(error, OSError):
        return Failure(error.strerror or str(error), cause=str(error.filename or ""))
    return Failure("boxctl itself failed", cause=f"{type(error).__name__}: {error}", remedy="Please report it, with what you typed.")
