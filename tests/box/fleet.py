"""A whole boxfleet of its own for tests: both daemons as `boxctl up` starts them, in a state folder that is gone afterwards."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import trio
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import TextContent

from node.cli.api import Api

BOXCTL = (sys.executable, "-P", "-m", "node.cli.main")
UP_WITHIN, DOWN_WITHIN, CALL_WITHIN = 300.0, 120.0, 300.0
POLL = 0.1
CONFIG = """
[node]
listen = "127.0.0.1:0"
unit_memory = {unit_memory}
unit_work = 4294967296
parallel_starts = 2
{node}
[coordinator]
listen = "127.0.0.1:0"
fleet_listen = "127.0.0.1:{fleet_port}"
default_flavour = "core"
{coordinator}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class Fleet:
    """`mcp_url`, `api_url` and `key` are what `boxctl connect --json` says; they change with a restart on port 0."""

    state: Path
    mcp_url: str = ""
    api_url: str = ""
    key: str = field(default="", repr=False)
    fleet_port: int = field(default_factory=free_port)  # stays: a node remembers where it joined

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "BOXFLEET_STATE": str(self.state)}

    def boxctl(self, *words: str, within: float = CALL_WITHIN, check: bool = True, **how: Any) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run([*BOXCTL, *words], env=self.environment, capture_output=True, timeout=within, check=False, **how)
        if check and done.returncode:
            raise AssertionError(f"boxctl {' '.join(words)} ended with {done.returncode}: {done.stderr.decode(errors='replace')}")
        return done

    def up(self) -> None:
        self.boxctl("up", "--flavour", "core", "--no-box", within=UP_WITHIN)
        told = json.loads(self.boxctl("connect", "--json").stdout)
        self.mcp_url, self.api_url, self.key = told["mcpUrl"], told["apiUrl"], told["apiKey"]

    def down(self) -> None:
        self.boxctl("down", within=DOWN_WITHIN)

    def configure(self, *, unit_memory: int = 1 << 30, node: str = "", coordinator: str = "") -> None:
        """Lines of the [node] and [coordinator] tables; the daemons read them when they start."""
        text = CONFIG.format(unit_memory=unit_memory, node=node, coordinator=coordinator, fleet_port=self.fleet_port)
        (self.state / "config.toml").write_text(text)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.boxctl("status", "--json").stdout))

    def start(self, name: str, flavour: str = "core") -> str:
        """A new box, as the operator starts it; its id."""
        return str(json.loads(self.boxctl("box", "start", "--name", name, "--flavour", flavour, "--json").stdout)["id"])

    @property
    def node(self) -> Api:
        return Api.on_socket("node", self.state / "run" / "node.sock")

    def change(self, box: str, change: str) -> dict[str, Any]:
        """freeze, thaw, archive or restore, past the coordinator."""
        return self.node.operate("POST", f"/v1/boxes/{box}/{change}", report=lambda message, fraction: None)

    def view(self, box: str) -> dict[str, Any]:
        return self.node.ask("GET", f"/v1/boxes/{box}")

    async def until(self, box: str, state: str) -> None:
        """Returns when the box has come to `state` by itself."""
        with trio.fail_after(CALL_WITHIN):
            while (await trio.to_thread.run_sync(self.view, box))["state"] != state:  # noqa: ASYNC110 - the node tells when asked
                await trio.sleep(POLL)

    def destroy(self, box: str) -> None:
        self.node.operate("DELETE", f"/v1/boxes/{box}", report=lambda message, fraction: None)

    def destroy_all(self) -> None:
        for box in self.node.ask("GET", "/v1/boxes")["boxes"]:
            self.destroy(box["id"])

    @asynccontextmanager
    async def agent(self, name: str = "agent0000001") -> AsyncIterator[Agent]:
        """An MCP client of its own, by the Python SDK; `name` is its conversation."""
        headers = {"Authorization": f"Bearer {self.key}", "X-Psbx-Agent": name}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=CALL_WITHIN) as http,
            Client(streamable_http_client(self.mcp_url, http_client=http), mode="legacy") as client,
        ):
            yield Agent(client)


@dataclass
class Agent:
    client: Client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The first block of a call that must work, as JSON."""
        result = await self.client.call_tool(tool, arguments)
        data = first_block(result)
        assert not result.is_error, data
        return data

    async def fail(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The error of a call that must not work."""
        result = await self.client.call_tool(tool, arguments)
        data = first_block(result)
        assert result.is_error, data
        error: dict[str, Any] = data["error"]
        return error

    async def start(self, name: str, **arguments: Any) -> str:
        return str((await self.call("sandbox_start", name=name, goal=f"test {name}", flavour="core", **arguments))["id"])

    async def run(self, box: str, cmd: str, **arguments: Any) -> str:
        """What a command that must end with 0 wrote, stripped."""
        done = await self.call("sandbox_exec", id=box, cmd=cmd, note="test", **arguments)
        assert done["exitCode"] == 0, done
        return str(done["stdout"]).strip()

    async def ready(self, box: str, command: str, **shown_by: Any) -> None:
        """Returns when a background command is ready by readyPort or readyLog, however busy the host is."""
        with trio.fail_after(CALL_WITHIN):
            while not (told := await self.call("sandbox_procs", id=box, action="wait", bgId=command, **shown_by))["ready"]:
                assert told["running"], told

    async def commands(self, box: str) -> dict[str, dict[str, Any]]:
        """All that the box knows of, by execId."""
        return {command["execId"]: command for command in (await self.call("sandbox_procs", id=box))["commands"]}


async def fetch(url: str) -> bytes:
    """What lies at a link that was given out: a plain GET, no key."""
    async with httpx2.AsyncClient(timeout=CALL_WITHIN) as http:
        return (await http.get(url)).raise_for_status().content


def first_block(result: Any) -> dict[str, Any]:
    assert isinstance(result.content[0], TextContent)
    data: dict[str, Any] = json.loads(result.content[0].text)
    return data


def images_folder() -> Path:
    """Where the core image was built for tests (`make test` says it in BOXFLEET_TEST_IMAGES)."""
    return Path(os.environ.get("BOXFLEET_TEST_IMAGES", "/var/tmp/boxfleet-test/lib/images"))


@contextmanager
def running_fleet(*, unit_memory: int = 1 << 30, node: str = "", coordinator: str = "") -> Iterator[Fleet]:
    """Up within; afterwards nothing of it is left: no process, namespace, link or file, which is checked."""
    state = Path(tempfile.mkdtemp(prefix="bf-", dir="/var/tmp"))
    fleet = Fleet(state)
    try:
        (state / "lib").mkdir()
        (state / "lib" / "images").symlink_to(images_folder())
        fleet.configure(unit_memory=unit_memory, node=node, coordinator=coordinator)
        fleet.up()
        yield fleet
        fleet.destroy_all()
    finally:
        fleet.boxctl("down", within=DOWN_WITHIN, check=False)
        left = leftovers(state)
        shutil.rmtree(state)
    assert not left, left


def leftovers(state: Path) -> list[str]:
    """What a fleet in `state` left behind: processes that hold its files, namespaces and links that carry its boxes' ids."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if f"BOXFLEET_STATE={state}".encode() in environment.split(b"\0") or any(path.startswith(f"{state}/") for path in held):
            processes.append(f"process {process.name}: {(process / 'cmdline').read_bytes().decode(errors='replace')[:200]}")
    boxes = {path.name for path in (state / "lib/node/boxes").glob("*")}
    namespaces = [f"namespace {path.name}" for path in Path("/run/netns").glob("bf-*") if path.name.removeprefix("bf-") in boxes]
    files = [f"file {path}" for path in (state / "lib/node/boxes").glob("*")]
    mounts = [f"mount {line.split()[1]}" for line in Path("/proc/self/mounts").read_text().splitlines() if str(state) in line]
    return processes + namespaces + files + mounts
