"""What a tool is: a name, words for a model that has never seen the product, an input, and what it does through its context."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

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


def at_work(path: str) -> str:
    """The absolute form of a path in a box; a relative one starts at /work (agents write both)."""
    if "\0" in path:
        raise ValueError("must not contain NUL")
    return posixpath.normpath(posixpath.join("/work", path))


def one_line(limit: int, *, empty: bool = False) -> AfterValidator:
    """Cuts a text as the client does when it compares: trimmed, newlines and tabs to spaces, `limit` code points (CONTRACT 2.1).
    A blank one counts as missing unless `empty`."""

    def cut(text: str) -> str:
        line = text.strip().translate(_SPACES)[:limit]
        if not line and not empty:
            raise PydanticCustomError("missing", "Field required")
        return line

    return AfterValidator(cut)


_SPACES = str.maketrans("\r\n\t", "   ")

BoxId = Annotated[str, Field(min_length=1, max_length=64, description="The box's id, from sandbox_start or sandbox_list.")]
WorkPath = Annotated[str, Field(max_length=4096), AfterValidator(at_work)]

InputT = TypeVar("InputT", bound=Input)


@dataclass(frozen=True)
class Tool(Generic[InputT]):
    """`box_use` says what a call does to a box: nothing, look without waking it, or wake it and count as use."""

    name: str
    title: str
    description: str
    input: type[InputT]
    box_use: BoxUse
    run: Callable[[Context, InputT], Awaitable[Result]]
    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False
    resumable: bool = False  # run again with the same `Caller.call` after a restart, it picks up where it was
    examples: Sequence[dict[str, Any]] = field(default_factory=tuple)
