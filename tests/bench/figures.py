"""What is measured, what each figure must reach, and how a run reads for people and for programs."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    what: str
    limit: float | None
    unit: str
    at_least: bool = False  # else the figure must not exceed the limit


@dataclass(frozen=True)
class Figure:
    """`broken` says in words which further promises of the row were not kept."""

    value: float
    detail: Mapping[str, Any] = field(default_factory=dict)
    broken: Sequence[str] = ()


ROWS = {
    "start_vs_bare": Row("sandbox_start until ready / bare start", 2.0, "x"),
    "cold_vs_start": Row("cold boot of the same image / sandbox_start", None, "x"),
    "freeze_vs_bare": Row("freeze / bare stop, save, kill", 3.0, "x"),
    "thaw_vs_bare": Row("frozen until an exec is answered / bare thaw", 1.5, "x"),
    "exec_vs_direct": Row("sandbox_exec true / the same asked of boxd", 1.3, "x"),
    "coordinator_added_ms": Row("a call, with a node in memory", 8.0, "ms"),
    "eight_at_once": Row("8 boxes at once / one after another", 1.2, "x"),
    "frozen_50": Row("daemons' memory for each of 50 frozen boxes", 1.0, "MB"),
    "rss_node": Row("node, idle", 120.0, "MB"),
    "rss_coordinator": Row("coordinator, idle", 150.0, "MB"),
    "mcp_calls_vs_bare": Row("calls/s of a trivial tool / bare MCP server", 0.6, "x", at_least=True),
    "up_cached": Row("make up to the first exec, image cached", None, "s"),
    "up_not_cached": Row("make up to the first exec, nothing there", None, "s"),
}


class Stopwatch(defaultdict[str, list[float]]):
    """Seconds by name."""

    def __init__(self) -> None:
        super().__init__(list)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self[name].append(time.perf_counter() - began)


def p50(values: Sequence[float]) -> float:
    return statistics.median(values)


def p99(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(len(values) * 0.99) - 1]


def ratio(ours: Sequence[float], theirs: Sequence[float], name: str, **more: Any) -> Figure:
    """p50 against p50; `name` is what `theirs` are called."""
    detail = {"p50_ms": ms(p50(ours)), f"{name}_p50_ms": ms(p50(theirs)), "p99_ms": ms(p99(ours)), "rounds": len(ours)}
    return Figure(p50(ours) / p50(theirs), detail | more)


def ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def missed(row: Row, figure: Figure) -> list[str]:
    """In words what the figure does not reach; empty when all is kept."""
    if row.limit is None or (figure.value >= row.limit if row.at_least else figure.value <= row.limit):
        return list(figure.broken)
    return [f"{'at least' if row.at_least else 'at most'} {row.limit:g} {row.unit}", *figure.broken]


def table(figures: Mapping[str, Figure]) -> str:
    lines = []
    for name, figure in figures.items():
        row = ROWS[name]
        limit = "" if row.limit is None else f"{'>=' if row.at_least else '<='} {row.limit:g}"
        verdict = f"MISSED: {', '.join(broken)}" if (broken := missed(row, figure)) else "ok" if limit else ""
        lines.append(f"{name:21} {figure.value:8.2f} {row.unit:3} {limit:7} {row.what:44} {verdict}".rstrip())
        lines.append(f"{'':21} {', '.join(f'{key} {value}' for key, value in figure.detail.items())}")
    return "\n".join(lines)


def save(path: Path, figures: Mapping[str, Figure]) -> None:
    told = {
        name: {"value": round(figure.value, 3), "limit": ROWS[name].limit, "unit": ROWS[name].unit}
        | {"detail": {**figure.detail, "missed": missed(ROWS[name], figure)}}
        for name, figure in figures.items()
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n")
