"""A tool's input as the wire has it: the schema that tools/list shows, and a client's arguments made into the tool's input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tools.context import ToolError
from tools.tool import InputT, Tool


def schema(tool: Tool[Any]) -> dict[str, Any]:
    """JSON Schema with definitions in place, no titles and no null variants: weak clients follow no `$ref` and stumble over `anyOf`."""
    raw = tool.input.model_json_schema()
    plain: dict[str, Any] = _plain(raw, raw.pop("$defs", {}))
    plain.pop("description", None)
    return plain


def parse(tool: Tool[InputT], arguments: Mapping[str, Any]) -> InputT:
    """The tool's input. ToolError `bad_request` names every wrong field; a missing one reads "<field> is required" (CONTRACT 2.1).
    A null counts as absent: many clients send every optional field as null."""
    if halves := [name for name, value in arguments.items() if _has_half_a_character(value)]:
        message = "; ".join(f"{name[:64]!a} holds half of a surrogate pair" for name in halves)
        raise ToolError("bad_request", message, cause="An emoji was cut in two.", remedy="Send whole characters.", hop="agent")
    try:
        return tool.input.model_validate({name: value for name, value in arguments.items() if value is not None})
    except ValidationError as error:
        known = ", ".join(field.alias or name for name, field in tool.input.model_fields.items()) or "no arguments"
        message = "; ".join(_sentence(detail) for detail in error.errors(include_url=False, include_context=False))
        raise ToolError(
            "bad_request", message, cause=f"{tool.name} takes {known}.", remedy="Correct the named fields and call again.", hop="agent"
        ) from None


def _has_half_a_character(value: Any) -> bool:
    """JSON can say "\\ud83d" alone, as clients do that cut texts by UTF-16 units; no database and no guest takes it."""
    texts = [text for pair in value.items() for text in pair] if isinstance(value, dict) else [value]
    try:
        "".join(text for text in texts if isinstance(text, str)).encode()
    except UnicodeEncodeError:
        return True
    return False


def _sentence(detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "arguments"
    match detail["type"]:
        case "missing":
            return f"{where} is required"
        case "extra_forbidden":
            return f"{where} is not an argument of this tool"
        case _:
            return f"{where}: {detail['msg'].removeprefix('Value error, ')}"


def _plain(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_plain(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]] | {key: value for key, value in node.items() if key != "$ref"}
    if "anyOf" in node:
        variants = [variant for variant in node["anyOf"] if variant != {"type": "null"}]
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        node = rest | (variants[0] if len(variants) == 1 else {"anyOf": variants})
    absent = {"title"} if not isinstance(node.get("title"), dict) else set()
    if node.get("default", ...) is None:
        absent.add("default")
    return {key: _plain(value, definitions) for key, value in node.items() if key not in absent}
