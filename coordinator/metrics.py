"""What /metrics tells. Every label has few values, all named here: no box, node or key is one."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import trio
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from node.protocol import BoxState

Operation = Literal["start", "freeze", "thaw", "exec", "restore", "stop"]
QUICK = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metrics:
    """One registry of our own: nothing of the process or of other libraries leaks into it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "boxfleet_operation_seconds", "Time of an operation, as its caller saw it", ["operation", "outcome"],
            registry=self._registry, buckets=QUICK,
        )  # fmt: skip
        self._boxes = Gauge("boxfleet_boxes", "Boxes by state", ["state"], registry=self._registry)
        self._nodes = Gauge("boxfleet_nodes", "Nodes by state", ["state"], registry=self._registry)
        self._calls = Histogram(
            "boxfleet_tool_call_seconds", "Tool calls over MCP", ["tool", "outcome"], registry=self._registry, buckets=QUICK
        )

    def tool_call(self, tool: str, outcome: str, seconds: float) -> None:
        """A call ended with "ok" or an error's code; codes may come from a guest, so they are no label."""
        self._calls.labels(tool, "ok" if outcome == "ok" else "failed").observe(seconds)

    @contextmanager
    def timed(self, operation: Operation) -> Iterator[None]:
        """Counts the body's time; outcome is ok, failed, or left when the caller stopped waiting."""
        began, outcome = trio.current_time(), "failed"
        try:
            yield
            outcome = "ok"
        except trio.Cancelled:
            outcome = "left"
            raise
        finally:
            self._seconds.labels(operation, outcome).observe(trio.current_time() - began)

    def text(self, *, boxes: Iterable[str], nodes: Iterable[str]) -> bytes:
        """The Prometheus text format, with the gauges set to these states."""
        counted = Count(boxes)
        for state in BoxState:
            self._boxes.labels(state.value).set(counted[state.value])
        nodes_counted = Count(nodes)
        for name in ("ready", "not_ready", "unreachable"):
            self._nodes.labels(name).set(nodes_counted[name])
        return generate_latest(self._registry)
