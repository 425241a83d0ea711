"""What every tool promises to a client that lists them."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

import tools
from tools.arguments import parse, schema
from tools.context import ToolError
from tools.table import BY_NAME, TOOLS
from tools.tool import Tool, at_work

FOLDER = Path(str(tools.__file__)).parent
EXPECTED = ["start", "list", "status", "exec", "procs", "say", "feedback", "stop"]

each_tool = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)


def nodes(value: Any) -> Iterator[Any]:
    yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(child)


def test_the_table_lists_the_tools_that_work_and_no_others() -> None:
    assert list(BY_NAME) == [f"sandbox_{name}" for name in EXPECTED]


def test_a_module_holds_one_tool_and_bears_its_name() -> None:
    modules = sorted(path.stem for path in FOLDER.glob("sandbox_*.py"))
    assert modules == sorted(BY_NAME)
    for name in modules:
        module = importlib.import_module(f"tools.{name}")
        assert [value.name for value in vars(module).values() if isinstance(value, Tool)] == [name]


def test_a_tool_module_imports_what_a_tool_is_and_what_it_may_do_and_nothing_else_of_ours() -> None:
    ours = {"tools", "coordinator", "node", "image"}
    for path in FOLDER.glob("sandbox_*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] in ours:
                assert statement.module in {"tools.tool", "tools.context"}, path.name


@each_tool
def test_a_tool_says_when_to_use_it_within_bounds(tool: Tool[Any]) -> None:
    assert 200 < len(tool.description) < 1800
    assert "JSON" in tool.description
    assert tool.title
    assert tool.examples


@each_tool
def test_a_schema_is_plain_enough_for_weak_clients(tool: Tool[Any]) -> None:
    shown = schema(tool)
    Draft202012Validator.check_schema(shown)
    assert (shown["type"], shown["additionalProperties"]) == ("object", False)
    for node in nodes(shown):
        if isinstance(node, dict):
            assert not {"$ref", "$defs", "anyOf", "oneOf", "title"} & node.keys()
    for name, field in shown["properties"].items():
        assert field["type"] in {"string", "integer", "number", "boolean", "object"}, name
        assert len(field["description"]) > 10, name
    assert set(shown.get("required", [])) <= shown["properties"].keys()
    assert json.loads(json.dumps(shown)) == shown


@each_tool
def test_the_examples_are_valid(tool: Tool[Any]) -> None:
    validator = Draft202012Validator(schema(tool))
    for example in tool.examples:
        parse(tool, example)
        validator.validate(example)


@each_tool
def test_a_missing_field_is_named_as_required(tool: Tool[Any]) -> None:  # CONTRACT 9 row 20
    required = [name for name, field in tool.input.model_fields.items() if field.is_required()]
    if not required:
        return
    with pytest.raises(ToolError) as caught:
        parse(tool, dict.fromkeys(schema(tool)["properties"]))
    assert caught.value.code == "bad_request"
    for name in required:
        assert f"{name} is required" in caught.value.message


@each_tool
def test_an_unknown_field_is_named_with_the_known_ones(tool: Tool[Any]) -> None:
    with pytest.raises(ToolError) as caught:
        parse(tool, {"boxId": "x"})
    assert "boxId is not an argument of this tool" in caught.value.message
    for name in schema(tool)["properties"]:
        assert name in caught.value.cause


texts = st.text() | st.just("\ud800")
anything = st.none() | st.booleans() | st.floats() | texts | st.lists(texts) | st.dictionaries(texts, st.integers() | texts)


@settings(max_examples=60, deadline=None)
@given(arguments=st.dictionaries(st.sampled_from(["id", "cmd", "note", "env", "cwd", "timeoutSec", "x"]), anything))
def test_whatever_comes_in_is_an_input_or_a_named_error(arguments: dict[str, Any]) -> None:
    with contextlib.suppress(ToolError):
        parse(BY_NAME["sandbox_exec"], arguments)


@pytest.mark.parametrize(
    ("path", "absolute"),
    [
        ("", "/work"),
        (".", "/work"),
        ("app", "/work/app"),
        ("app/", "/work/app"),
        ("/work/app", "/work/app"),
        ("/tmp", "/tmp"),
        ("../etc", "/etc"),
    ],
)
def test_a_path_may_be_absolute_or_relative_to_work(path: str, absolute: str) -> None:  # CONTRACT 9 row 1
    assert at_work(path) == absolute
