"""The protocol's dataclasses as JSON and back: camelCase names, types checked, and every refusal names the field."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from typing import Any, TypeVar

from .http1 import Refused

T = TypeVar("T")


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def to_wire(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {camel(f.name): to_wire(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list):
        return [to_wire(item) for item in value]
    return value


def from_wire(cls: type[T], body: bytes) -> T:
    """`body` as a `cls`; raises Refused (400, `bad_request`) for what is not JSON, unknown, missing or of another type."""
    try:
        data = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "bad_request", "The body is not JSON.", str(error)) from error
    if not isinstance(data, dict):
        raise Refused(400, "bad_request", "The body must be a JSON object.")
    known = _fields(cls)  # type: ignore[arg-type]  # a class is hashable, whatever typeshed makes of type[T]
    if unknown := sorted(set(data) - set(known)):
        raise Refused(400, "bad_request", f"Unknown field {unknown[0][:64]!r}.", remedy=f"Fields: {', '.join(known)}.")
    for name, (_, hint, required) in known.items():
        if name not in data and required:
            raise Refused(400, "bad_request", f"The field {name!r} is missing.")
        if name in data and not _fits(data[name], hint):
            raise Refused(400, "bad_request", f"The field {name!r} is of another type.", f"expected {hint}")
    return cls(**{known[name][0]: value for name, value in data.items()})


@functools.cache
def _fields(cls: type[Any]) -> dict[str, tuple[str, Any, bool]]:
    hints = typing.get_type_hints(cls)
    empty = dataclasses.MISSING
    return {camel(f.name): (f.name, hints[f.name], f.default is empty and f.default_factory is empty) for f in dataclasses.fields(cls)}


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(isinstance(item, str) for pair in value.items() for item in pair)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
