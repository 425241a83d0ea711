"""The documentation says what the code does: settings, codes, paths, commands and examples are held to their sources, both ways."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import typer

from coordinator.config import CoordinatorConfig, Presence
from image.recipe import Settings
from node.cli.main import app
from node.config import Clocks, NodeConfig
from node.doctor.checks import CHECKS
from tools.arguments import parse
from tools.table import BY_NAME

ROOT = Path(__file__).parents[2]
DOCS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}

SETTINGS: dict[str, type[Any]] = {
    "[node]": NodeConfig,
    "[node.clocks]": Clocks,
    "[coordinator]": CoordinatorConfig,
    "[coordinator.presence]": Presence,
    "[image]": Settings,
}
NOT_SET_HERE = {"places", "clocks", "presence"}  # the environment's, and tables of their own

HOPS = {  # the heading under which a folder's codes stand; the first that holds a file counts
    "tools": "Agent link: tools and /mcp",
    "coordinator/mcp": "Agent link: tools and /mcp",
    "coordinator": "Coordinator",
    "node": "Node and VM",
    "image/boxd": "Guest: boxd",
}
CODE_ARGUMENT = {"ToolError": 0, "Refused": 1, "_lost": 0}  # which positional argument of a call is a code
IN_JSON = re.compile(r'"code": "(\w+)"')


def section(document: str, heading: str) -> str:
    """What stands below a heading, up to the next one."""
    _, found, rest = DOCS[document].partition(f" {heading}\n")
    assert found, f"{document} has no heading {heading!r}"
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows whose first cell is code, without the marks of code."""
    lines = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `"))
    return [[cell.strip().removeprefix("`").removesuffix("`") for cell in line] for line in lines]


def toml(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("table", SETTINGS)
def test_every_setting_is_documented_with_its_default(table: str) -> None:
    known = {f.name: toml(f.default) for f in fields(SETTINGS[table]) if f.name not in NOT_SET_HERE and f.default is not MISSING}
    assert {name: default for name, default, _ in rows(section("docs/admins.md", table))} == known


def test_every_check_of_doctor_is_documented_in_its_order() -> None:
    told = [name for name, _ in rows(section("docs/admins.md", "What a host needs"))]
    assert told == [check.__name__ for check in CHECKS]


def codes(tree: ast.AST) -> Iterator[str]:
    """Every error code that a module can make, by the ways in which this code base makes them."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                for line in body:
                    match line:
                        case ast.Assign(targets=[ast.Name(id="code" | "default_code")], value=value):
                            yield from texts(value)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                yield from (text for keyword in keywords if keyword.arg == "code" for text in texts(keyword.value))
                if len(args) > CODE_ARGUMENT.get(name, len(args)):
                    yield from texts(args[CODE_ARGUMENT[name]])
            case ast.Dict(keys=keys, values=values):
                yield from (text for key, value in zip(keys, values, strict=True) if texts(key) == ["code"] for text in texts(value))
            case ast.Constant(value=str(text)):
                yield from IN_JSON.findall(text)


def texts(node: ast.AST | None) -> list[str]:
    """The literal texts that an expression may be."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=body, orelse=orelse):
            return [*texts(body), *texts(orelse)]
        case _:
            return []


@pytest.mark.parametrize("hop", sorted(set(HOPS.values())))
def test_every_error_code_is_documented_and_every_documented_code_exists(hop: str) -> None:
    sources = {path: next(HOPS[f] for f in HOPS if path.is_relative_to(ROOT / f)) for f in HOPS for path in (ROOT / f).rglob("*.py")}
    made = {code for path, place in sources.items() if place == hop for code in codes(ast.parse(path.read_text()))}
    told = [code for code, _, _ in rows(section("docs/errors.md", hop))]
    assert sorted(told) == sorted(made)


def test_every_path_of_rest_is_documented() -> None:
    source = (ROOT / "coordinator/rest/api.py").read_text()
    served = {f"{verb.upper()} {path}" for verb, path in re.findall(r'@app\.(get|post|delete)\("([^"]+)"\)', source)}
    told = {row[0] for row in rows(DOCS["docs/rest.md"])}
    assert {re.sub(r"\{\w+\}", "*", path) for path in told} == {re.sub(r"<[^>]+>", "*", path) for path in served}


def commands() -> list[tuple[str, str]]:
    """(document, words after `boxctl`) of every command line printed: in code spans, and in indented lines."""
    found = []
    for document, text in DOCS.items():
        spans = re.findall(r"`(boxctl [^`]+)`", text)
        spans += [call for line in re.findall(r"^    ([^#\n]+)", text, re.MULTILINE) for call in re.findall(r"boxctl [^|()]+", line)]
        found += [(document, span.removeprefix("boxctl ").strip()) for span in spans]
    return found


@pytest.mark.parametrize(("document", "line"), sorted(set(commands())))
def test_every_command_of_boxctl_that_is_printed_exists(document: str, line: str) -> None:
    words, command = line.split(), typer.main.get_command(app)
    while subcommands := getattr(command, "commands", {}):
        assert next(iter(words), "nothing") in subcommands, f"{document}: boxctl {line}"
        command = subcommands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    asked = words[: words.index("--")] if "--" in words else words
    assert {word for word in asked if word.startswith("--")} <= known, f"{document}: boxctl {line}"


def test_every_target_of_make_that_is_printed_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    printed = {target for text in DOCS.values() for target in re.findall(r"(?:`|^    )make ([a-z]+)", text, re.MULTILINE)}
    assert printed <= targets


def test_every_example_for_agents_is_a_call_that_its_tool_takes() -> None:
    calls = re.findall(r"^    (sandbox_\w+) (\{.*\})$", DOCS["docs/SKILL.md"], re.MULTILINE)
    for name, arguments in calls:
        parse(BY_NAME[name], json.loads(arguments))
    assert {name for name, _ in calls} | {"sandbox_list"} == set(BY_NAME)


def test_no_tool_is_named_that_does_not_exist_but_those_said_to_be_missing() -> None:
    named = {name for text in DOCS.values() for name in re.findall(r"\bsandbox_[a-z]+\b", text)}
    assert named - {"sandbox_sync", "sandbox_pull"} == set(BY_NAME)


def test_links_between_documents_lead_somewhere() -> None:
    for document, text in DOCS.items():
        for target in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (ROOT / document).parent.joinpath(target).exists(), f"{document}: {target}"
