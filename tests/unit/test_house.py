"""The rules of the house: who may import whom, what a protocol module needs, what no file holds. Read from the sources as they are."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 600  # lines
ROOMS_WITHOUT_A_NAME = {"utils", "util", "common", "helpers", "misc", "shared"}

# Who may import what of ours; the first line that fits counts. A name stands for itself and all below it.
MAY_IMPORT = {
    "image.boxd": ["image.boxd"],
    "image": ["image"],
    "tools.table": ["tools"],
    "tools": ["tools.tool", "tools.context"],
    "coordinator": ["coordinator", "tools", "node.protocol"],
    "node.cli": ["node", "image"],
    "node": ["node", "image.store", "image.boxd.protocol"],
}
PROTOCOLS_NEED = {"node.protocol": {"pydantic"}, "image.boxd.protocol": set[str]()}

# In parts, so that this file is not the one that holds them.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"), ("pythonhosted", "org"), ("registry", "npmjs"), ("registry", "yarnpkg"), ("deb", "debian", "org"),
        ("docker", "io/"), ("proxy", "golang"), ("ghcr", "io"), ("quay", "io"), ("crates", "io"), ("rubygems", "org"),
    )
]  # fmt: skip
PLACES_OF_ONE_MACHINE = [f"/{'work'}/{folder}" for folder in ("main", "shared", "tmp")]


@functools.cache
def tracked() -> list[Path]:
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


@functools.cache
def packages() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed: list[str] = project["tool"]["setuptools"]["packages"]
    return listed


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name; a package goes by its own name."""
    found = {}
    for package in packages():
        for path in sorted((ROOT / package.replace(".", "/")).glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


def imports(module: str, *, late: bool = True) -> Iterator[str]:
    """Dotted names of the modules that it imports; `late` includes those inside of functions."""
    path = modules()[module]
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree) if late else at_import_time(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield name if name in modules() else source


def at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from at_import_time(node)


def below(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def ours(name: str) -> bool:
    return name.partition(".")[0] in {"tools", "coordinator", "node", "image", "tests"}


@pytest.mark.parametrize("module", modules())
def test_imports_point_one_way(module: str) -> None:
    allowed = next(rooms for room, rooms in MAY_IMPORT.items() if below(module, room))
    wrong = [name for name in imports(module) if ours(name) and not any(below(name, room) for room in allowed)]
    assert not wrong


def test_nothing_of_the_node_imports_its_cli() -> None:
    wrong = [(module, name) for module in modules() if below(module, "node") and not below(module, "node.cli")
             for name in imports(module) if below(name, "node.cli")]  # fmt: skip
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: {name for name in imports(module, late=False) if name in modules() and name != module} for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" > ".join(error.args[1]))


@pytest.mark.parametrize("module", [module for module in modules() if below(module, "image.boxd")])
def test_boxd_needs_the_standard_library_only_and_knows_itself_by_relative_names(module: str) -> None:
    tree = ast.parse(modules()[module].read_text())
    absolute = [
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        )
    ]  # fmt: skip
    assert [name for name in absolute if name.partition(".")[0] not in sys.stdlib_module_names] == []


@pytest.mark.parametrize("module", PROTOCOLS_NEED)
def test_a_protocol_needs_next_to_nothing(module: str) -> None:
    needed = {name.partition(".")[0] for name in imports(module)} - sys.stdlib_module_names
    assert needed <= PROTOCOLS_NEED[module]


def test_pyproject_lists_every_package() -> None:
    folders = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in tracked() if path.name == "__init__.py"}
    assert {folder for folder in folders if not below(folder, "tests")} == set(packages())


def test_every_init_is_a_docstring() -> None:
    speaking = [name for name, path in modules().items() if path.stem == "__init__" and len(ast.parse(path.read_text()).body) > 1]
    assert not speaking


def test_no_room_is_called_after_nothing() -> None:
    names = {part.removesuffix(".py") for path in tracked() for part in path.relative_to(ROOT).parts}
    assert not names & ROOMS_WITHOUT_A_NAME


def test_no_file_is_longer_than_one_idea() -> None:
    long = [str(path.relative_to(ROOT)) for path in tracked() if path.suffix in {".py", ".js", ".css", ".sh"}
            and len(path.read_bytes().splitlines()) > LONGEST_FILE]  # fmt: skip
    assert not long


@pytest.mark.parametrize("words", [REGISTRIES, PLACES_OF_ONE_MACHINE], ids=["registries", "places of one machine"])
def test_no_tracked_file_names(words: list[str]) -> None:
    found = [(str(path.relative_to(ROOT)), word) for path in tracked() for word in words if word.encode() in path.read_bytes()]
    assert not found
