"""What a tool is: a name, words for a model that has never seen the product, an input, and what it does through its context."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from tools.context import Context

BoxUse = Literal["none", "observe", "wake"]


class Input(BaseModel):
    """A tool's arguments: camelCase on the wire, unknown ones refused by name. `model_json_schema()` is what tools/list shows."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


@dataclass(frozen=True)
class Image:
    data: bytes
    mime_type: str


@dataclass(frozen=True)
class Result:
    """`data` becomes the first text block, pure JSON (CONTRACT 0.9); `more` are the text and image blocks behind it."""

    data: dict[str, Any]
    more: Sequence[str | Image] = ()
    failed: bool = False

    def text(self) -> str:
        return json.dumps(self.data, ensure_ascii=False, separators=(",", ":"))


I = TypeVar("I", bound=Input)


@dataclass(frozen=True)
class Tool(Generic[I]):
    """`box_use` says what a call does to a box: nothing, look without waking it, or wake it and count as use."""

    name: str
    title: str
    description: str
    input: type[I]
    box_use: BoxUse
    run: Callable[[Context, I], Awaitable[Result]]
    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False
    examples: Sequence[dict[str, Any]] = field(default_factory=tuple)
