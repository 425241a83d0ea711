"""What a tool may do, as small Protocols; the coordinator implements them. A tool knows no VM, no SQL and no HTTP.

Values that come back are plain dicts ready for JSON, camelCase, with the shapes that CONTRACT 3 gives. Every failure is a ToolError.
Every method authorises against the caller's account: an id is a name, not a capability. Cancelling a method stops the wait, never the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class ToolError(Exception):
    """A failure as an agent reads it; `hop` is one of agent, coordinator, node, vm, guest."""

    def __init__(self, code: str, message: str, *, cause: str = "", remedy: str = "", hop: str = "coordinator") -> None:
        super().__init__(message)
        self.code, self.message, self.cause, self.remedy, self.hop = code, message, cause, remedy, hop


@dataclass(frozen=True)
class Caller:
    """Who calls: `conversation` from X-Psbx-Agent, else mcp-session-id, else key and client name."""

    account: str
    key_name: str
    conversation: str
    client: str | None  # "claude-code/2.1", from X-Psbx-Client or clientInfo
    wait_sec: float  # X-Psbx-Tool-Wait-Sec, 25 when absent: the longest wait the caller survives without progress
    call: str = ""  # names this call, 32 hex; the same again when it is taken up after a restart of the coordinator


class Boxes(Protocol):
    async def start(
        self, *, name: str, goal: str, size: int, flavour: str | None, wait_for_capacity_sec: float, restore: str | None
    ) -> dict[str, Any]:
        """{id, name, goal, status, flavour, size, createdAt, ...}. The same (conversation, name, goal) within a minute of a start that is
        under way or just done answers with that box (`reused: true`), unless `restore`.
        Errors: no_capacity, image_missing, box_not_found."""

    async def list(self) -> list[dict[str, Any]]:
        """Every box of the account: {id, name, goal, status, createdAt, agent: {state, thisConversation, client}, ...}; never wakes."""

    async def status(self, box: str) -> dict[str, Any]:
        """The whole view: state, guest health, goal, steps (last 30), agent, stopsAt, fromHuman; never wakes."""

    async def exec(
        self,
        box: str,
        *,
        cmd: str,
        note: str,
        cwd: str,
        user: str,
        env: Mapping[str, str],
        timeout_sec: float | None,
        background: bool,
        exec_id: str | None,
    ) -> dict[str, Any]:
        """Wakes; {execId, exitCode, signal, timedOut, stdout, stderr, truncated, outputUrl, ...} or, in the background, {bgId, pid, log}.
        Bytes that are not UTF-8 come as stdoutBase64/stderrBase64 beside a readable text (report 10)."""

    async def commands(self, box: str) -> Sequence[dict[str, Any]]: ...

    async def wait_command(
        self, box: str, exec_id: str, *, wait_sec: float, until: Literal["exited", "ready"], ready_port: int | None, ready_log: str | None
    ) -> dict[str, Any]: ...

    async def stop_command(self, box: str, exec_id: str) -> dict[str, Any]: ...

    async def say(self, box: str, text: str) -> dict[str, Any]: ...

    async def stop(self, box: str, *, delete: bool) -> dict[str, Any]:
        """Archives, or deletes; a repeat within 10 min gives the first answer again. Tells unsavedWork."""


class Words(Protocol):
    async def feedback(self, *, task: str, usage: str, problems: str, suggestions: str, box: str | None) -> dict[str, Any]: ...


class Context(Protocol):
    @property
    def caller(self) -> Caller: ...

    @property
    def boxes(self) -> Boxes: ...

    @property
    def words(self) -> Words: ...

    async def progress(self, message: str, fraction: float | None = None) -> None:
        """Tells the waiting agent; does nothing when nobody listens."""
