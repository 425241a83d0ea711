"""What a tool call costs where no guest runs. The client is as lean as one can be, so that servers are measured and not it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from tests.bench.figures import Figure, Stopwatch, ms, p50, p99

VERSION = "2025-06-18"
WARM, CALLS, CLIENTS = 30, 400, 8
SLICES, SLICE = 6, 1.0  # turns of each server, seconds


class Caller:
    """One MCP session over one kept connection."""

    def __init__(self, url: str, key: str) -> None:
        place = urlsplit(url)
        self._path, self._ids = place.path, count(1)
        self._link = http.client.HTTPConnection(place.netloc, timeout=30)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Mcp-Protocol-Version": VERSION}
        self._headers |= {"Accept": "application/json, text/event-stream", "X-Psbx-Agent": "bench0000001"}
        hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
        self._headers["Mcp-Session-Id"] = self._post({"id": next(self._ids), "method": "initialize", "params": hello})[0]
        self._post({"method": "notifications/initialized"})

    def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The tool's first block as JSON."""
        params = {"name": tool, "arguments": arguments}
        body = self._post({"id": next(self._ids), "method": "tools/call", "params": params})[1]
        event = next(line for line in reversed(body.splitlines()) if line.startswith((b"data: {", b"{")))
        result = json.loads(event.removeprefix(b"data: "))["result"]
        assert not result.get("isError"), result
        block: dict[str, Any] = json.loads(result["content"][0]["text"])
        return block

    def close(self) -> None:
        self._link.close()

    def _post(self, message: dict[str, Any]) -> tuple[str, bytes]:
        self._link.request("POST", self._path, json.dumps({"jsonrpc": "2.0", **message}).encode(), self._headers)
        answer = self._link.getresponse()
        body = answer.read()
        assert answer.status < 300, body
        return answer.getheader("mcp-session-id", ""), body


@contextmanager
def server(kind: str) -> Iterator[Callable[[], Caller]]:
    """A process of tests/bench/servers.py; yields what makes a client of it."""
    argv = [sys.executable, "-m", "tests.bench.servers", kind]
    with ExitStack() as stack, subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        stack.callback(process.stdin.close)
        told = json.loads(process.stdout.readline())

        def client() -> Caller:
            caller = Caller(told["url"], told["key"])
            stack.callback(caller.close)
            return caller

        try:
            yield client
        finally:
            stack.close()


def coordinator_added(rounds: int) -> dict[str, Figure]:
    print("bench: calls through the coordinator", file=sys.stderr)
    with server("coordinator") as client, ThreadPoolExecutor(CLIENTS) as pool:
        one = client()
        box = one("sandbox_start", name="box", goal="be called")["id"]

        def exec_times(call: Caller, calls: int) -> list[float]:
            watch = Stopwatch()
            for _ in range(calls):
                with watch.time("exec"):
                    call("sandbox_exec", id=box, cmd="true", note="bench")
            return watch["exec"]

        exec_times(one, WARM)
        alone = exec_times(one, CALLS)
        crowd = [seconds for times in pool.map(exec_times, [client() for _ in range(CLIENTS)], [CALLS // 4] * CLIENTS) for seconds in times]
        watch = Stopwatch()
        for _ in range(CALLS // 4):
            with watch.time("list"):
                one("sandbox_list")
    detail = {"p99": ms(p99(alone)), "p50_at_8_clients": ms(p50(crowd)), "p99_at_8_clients": ms(p99(crowd))}
    return {"coordinator_added_ms": Figure(p50(alone) * 1000, detail | {"sandbox_list": ms(p50(watch["list"])), "calls": CALLS})}


def mcp_calls(rounds: int) -> dict[str, Figure]:
    print("bench: calls of a trivial tool, ours and bare in turn", file=sys.stderr)
    done = {"trivial": 0, "bare": 0}
    with server("trivial") as ours, server("bare") as theirs, ThreadPoolExecutor(2) as pool:
        callers = {"trivial": [ours(), ours()], "bare": [theirs(), theirs()]}  # two keep a server busy that has one core

        def calls_until(call: Caller, deadline: float) -> int:
            for number in count():
                if time.perf_counter() > deadline:
                    return number
                call("echo", text="hello")
            return 0

        for turn in range(SLICES + 1):
            for name, pair in callers.items():
                calls = sum(pool.map(calls_until, pair, [time.perf_counter() + SLICE] * 2))
                done[name] += calls if turn else 0  # the first turn warms up
    detail = {f"{name}_per_s": round(calls / (SLICES * SLICE)) for name, calls in done.items()}
    return {"mcp_calls_vs_bare": Figure(done["trivial"] / done["bare"], detail)}
