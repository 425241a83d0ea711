"""How things are shown: tables and progress for people, JSON for machines, errors as three lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from node.cli.failure import Failure

Report = Callable[[str, float | None], None]  # what is being done, and how much of it is


def out() -> Console:
    """stdout. Nothing is cut to a width when a program reads it."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 10_000)


def talk() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line for the person, on stderr."""
    talk().print(Text(printable(text)))


def warn(text: str) -> None:
    talk().print(Text(printable(text), style="yellow"))


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row))
    console = out()
    with console.capture() as rendered:
        console.print(table)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in rendered.get().splitlines()))


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """A thing's properties, a line each; those without a value are left out."""
    present = [(name, printable(str(value))) for name, value in fields if value not in (None, "")]
    width = max((len(name) for name, _ in present), default=0)
    for name, value in present:
        out().print(Text(f"{name:<{width}}  {value}"))


def print_failure(failure: Failure) -> None:
    lines = [("error", str(failure), "bold red"), ("cause", failure.cause, ""), ("what to do", failure.remedy, "")]
    for label, text, style in lines:
        if text:
            talk().print(Text(f"{label}: ", style=style).append(printable(text), style="default"))


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """A line that says what is being done; on a terminal it moves, in a log each new step is a line."""
    console = talk()
    if not console.is_terminal:
        said = ""

        def log(message: str, fraction: float | None) -> None:
            nonlocal said
            if message and message != said:
                said = message
                say(f"{title}: {message}")

        yield log
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def move(message: str, fraction: float | None) -> None:
            description = f"{title}: {printable(message)}" if message else None
            bar.update(task, description=description, total=None if fraction is None else 1.0, completed=fraction)

        yield move


def printable(text: str) -> str:
    """The text without control characters: names, consoles and outputs come from guests, which must not steer the operator's terminal."""
    return "".join(c if c in "\n\t" or (c.isprintable() and c != "\x9b") else ("" if c == "\r" else "�") for c in text)


def size(count: float | None) -> str:
    """Bytes for people: 1536 -> "1.5 KB"."""
    if count is None:
        return ""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


def ago(moment: float | str | None, now: float | None = None) -> str:
    """A time for people, "3 min ago", "in 2 h". The node tells Unix seconds, the coordinator ISO 8601."""
    if not moment:
        return ""
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment).timestamp()
    distance = (time.time() if now is None else now) - moment
    amount = duration(abs(distance))
    return f"{amount} ago" if distance >= 0 else f"in {amount}"


def duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and unit == "min"):
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
