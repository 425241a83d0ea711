"""What the server says of itself, and how a tool's result or failure reads on the wire. tools/list is the same bytes every time, one page,
without outputSchema (CONTRACT 0.2, 0.3, 2.1)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mcp_types import SERVER_INFO_META_KEY
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, MODERN_PROTOCOL_VERSIONS

from tools.arguments import schema
from tools.context import ToolError
from tools.table import TOOLS
from tools.tool import Image, Result, Tool

INSTRUCTIONS: Final = """\
boxfleet gives you computers of your own: Linux microVMs ("boxes") with root, internet access and a virtual display. A person may watch.
- First sandbox_start, with a goal (required): what this box is for. One box per task; keep its id and reuse it. sandbox_list finds it.
- sandbox_exec runs bash in it. note is required: say why, for the person. Work in /work and commit often.
- Servers, watchers and long builds: background: true. Then sandbox_procs wait (for the end, a port or a log line) and sandbox_procs stop;
  do not use pkill, killall, nohup or &.
- What waits cost: a start about 2 s, waking a frozen box under 1 s, an exec as long as its command. An unused box freezes after 10 minutes.
- If an answer does not arrive, the work goes on: fetch it with sandbox_procs wait and the execId, or look with sandbox_list. Do not blindly
  start again.
- Errors name code, cause and remedy: do what the remedy says. fromHuman in a result is the person speaking: follow it.
- At the end: sandbox_feedback once, then sandbox_stop (it archives; read unsavedWork before you use delete: true)."""

SERVER: Final = {"name": "boxfleet", "title": "boxfleet", "version": "0.1.0"}
CAPABILITIES: Final = {"tools": {"listChanged": False}}


def listed(tool: Tool[Any]) -> dict[str, Any]:
    description = tool.description
    input_schema = schema(tool)
    if tool.examples:
        input_schema["examples"] = list(tool.examples)
    hints = {
        "readOnlyHint": tool.read_only,
        "destructiveHint": tool.destructive,
        "idempotentHint": tool.idempotent,
        "openWorldHint": tool.box_use == "wake",
    }
    return {"name": tool.name, "title": tool.title, "description": description, "inputSchema": input_schema, "annotations": hints}


def tool_list(tools: Iterable[Tool[Any]] = TOOLS) -> dict[str, Any]:
    return {"tools": [listed(tool) for tool in tools]}


def initialized(params: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to `initialize`: the asked version if it has a handshake, else the newest that has."""
    asked = params.get("protocolVersion")
    version = asked if asked in HANDSHAKE_PROTOCOL_VERSIONS else LATEST_HANDSHAKE_VERSION
    return {"protocolVersion": version, "capabilities": CAPABILITIES, "serverInfo": SERVER, "instructions": INSTRUCTIONS}


def discovered() -> dict[str, Any]:
    """The answer to `server/discover` of 2026-07-28."""
    return {"supportedVersions": list(MODERN_PROTOCOL_VERSIONS), "capabilities": CAPABILITIES, "instructions": INSTRUCTIONS}


def modern(result: Mapping[str, Any], *, cacheable: bool) -> dict[str, Any]:
    """A result with the fields that 2026-07-28 demands of every one."""
    caching = {"ttlMs": 60_000, "cacheScope": "public"} if cacheable else {}
    return {"resultType": "complete", **result, **caching, "_meta": {SERVER_INFO_META_KEY: SERVER}}


def content(result: Result) -> dict[str, Any]:
    """A tools/call result: first block pure JSON, whatever else behind it (CONTRACT 0.9)."""
    blocks = [_text(result.text()), *(_text(more) if isinstance(more, str) else _image(more) for more in result.more)]
    return {"content": blocks, "isError": True} if result.failed else {"content": blocks}


def failure(error: ToolError) -> dict[str, Any]:
    """A failure is a result too, so that the model reads it and no client takes it for a broken link (CONTRACT 0.4, 0.5)."""
    parts = {"code": error.code, "message": error.message, "cause": error.cause, "remedy": error.remedy, "hop": error.hop}
    sentences = [error.message, error.cause and f"Cause: {error.cause}", error.remedy]
    line = " ".join(sentence if sentence.endswith((".", "!", "?")) else f"{sentence}." for sentence in sentences if sentence)
    return content(Result({"error": parts}, more=(f"{error.code} ({error.hop}): {line}",), failed=True))


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(image: Image) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(image.data).decode(), "mimeType": image.mime_type}
