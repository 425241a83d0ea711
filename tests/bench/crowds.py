"""Many boxes on one node, and what the daemons weigh."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import trio

from node.storage.space import allocated_bytes
from tests.bench.figures import Figure, Stopwatch, ms, p50
from tests.bench.lives import change, remove
from tests.box.fleet import Fleet

MB = 1e6
EIGHT, FIFTY = 8, 50
LIST_WITHIN = 0.1  # seconds
QUIET = 3.0  # seconds until daemons count as idle
HEARD = 6.0  # seconds until a heartbeat has told the coordinator of room that boxes left
LOOKS = 10


async def eight_at_once(fleet: Fleet, rounds: int) -> dict[str, Figure]:
    watch = Stopwatch()
    async with fleet.agent() as agent:
        await remove(agent, await agent.start("first"))
        print("bench: 8 boxes, one after another, then at once", file=sys.stderr)
        with watch.time("row"):
            boxes = [await agent.start(f"row {number}") for number in range(EIGHT)]
        for box in boxes:
            await remove(agent, box)
        await trio.sleep(HEARD)
        with watch.time("crowd"):
            async with trio.open_nursery() as nursery:
                for number in range(EIGHT):
                    nursery.start_soon(agent.start, f"crowd {number}")
        ready = [box["id"] for box in (await agent.call("sandbox_list"))["boxes"] if box["status"] == "ready"]
    at_once, one_by_one = watch["crowd"][0], watch["row"][0]
    detail = {"at_once_s": round(at_once, 2), "one_by_one_s": round(one_by_one, 2), "ready": len(ready)}
    return {"eight_at_once": Figure(at_once / one_by_one, detail, [] if len(ready) == EIGHT else ["all ready"])}


async def frozen_50(fleet: Fleet, rounds: int) -> dict[str, Figure]:
    watch, node = Stopwatch(), fleet.node
    async with fleet.agent() as agent:
        await remove(agent, await agent.start("first"))
        ensure_space(fleet, FIFTY)
        before = resident(fleet)
        for number in range(FIFTY):
            print(f"bench: freezing box {number + 1} of {FIFTY}", file=sys.stderr)
            await change(node, await agent.start(f"frozen {number}"), "freeze")
        await trio.sleep(QUIET)
        grown = {name: resident(fleet)[name] - before[name] for name in before}
        processes = len(machines(fleet))
        for _ in range(LOOKS):
            with watch.time("list"):
                await agent.call("sandbox_list")
            with watch.time("node_list"):
                await trio.to_thread.run_sync(lambda: node.ask("GET", "/v1/boxes"))
        memory = [allocated_bytes(path) for path in (fleet.state / "lib/node/boxes").glob("*/ram")]
    promises = {
        f"{processes} processes left": processes == 0,
        f"list within {ms(LIST_WITHIN):g} ms": max(p50(watch["list"]), p50(watch["node_list"])) < LIST_WITHIN,
        f"{len(memory)} frozen": len(memory) == FIFTY,
    }
    detail = {"processes": processes, "list_ms": ms(p50(watch["list"])), "node_list_ms": ms(p50(watch["node_list"]))}
    detail |= {f"{name}_grew_mb": round(grown[name] / MB, 1) for name in grown} | {"ram_file_mb": round(p50(memory) / MB)}
    return {"frozen_50": Figure(sum(grown.values()) / FIFTY / MB, detail, [words for words, kept in promises.items() if not kept])}


async def idle(fleet: Fleet, rounds: int) -> dict[str, Figure]:
    """Daemons that are up and enrolled, and no box runs."""
    await trio.sleep(QUIET)
    found = {name: value / MB for name, value in resident(fleet).items()}
    node = Figure(found["node"] + found["resolver"], {"daemon": round(found["node"], 1), "resolver": round(found["resolver"], 1)})
    return {"rss_node": node, "rss_coordinator": Figure(found["coordinator"])}


def resident(fleet: Fleet) -> dict[str, int]:
    """Bytes of each of the fleet's own processes; the resolver is the node's child."""
    told = json.loads(fleet.boxctl("status", "--json").stdout)
    node = told["node"]["pid"]
    resolver = [pid for pid in children(node) if b"node.net.dns" in command_line(pid)]
    return {"node": rss(node), "resolver": sum(map(rss, resolver)), "coordinator": rss(told["coordinator"]["pid"])}


def machines(fleet: Fleet) -> list[int]:
    """The node's QEMU processes."""
    node = json.loads(fleet.boxctl("status", "--json").stdout)["node"]["pid"]
    return [pid for pid in children(node) if command_line(pid).startswith(b"qemu")]


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def rss(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def ensure_space(fleet: Fleet, boxes: int) -> None:
    """A frozen box keeps its RAM file, which is a little more than its template's."""
    rams = (fleet.state / "lib/node/templates").glob("core-1-*/ram")
    needed = 2 * boxes * max(map(allocated_bytes, rams))
    free = shutil.disk_usage(fleet.state).free
    print(f"bench: {boxes} frozen boxes take up to {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free", file=sys.stderr)
    if needed > free:
        raise OSError(f"{boxes} frozen boxes need {needed / 1e9:.1f} GB in {fleet.state}, {free / 1e9:.1f} GB are free")
