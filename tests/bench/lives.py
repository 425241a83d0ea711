"""What happens to one box, each beside the same done barely: every round is one bare life and one of ours, so that noise hits both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from image.store import ImageStore
from node.cli.api import Api
from node.config import Places, load_node_config
from node.guest import Guest
from node.net.network import BoxNetwork
from node.protocol import RunCommand
from tests.bench.figures import Figure, Stopwatch, ms, ratio
from tests.box.fleet import Agent, Fleet

BARE = Path(__file__).with_name("bare.py")
EXECS = 5  # of each kind a round
COLD_BOOTS = 3


async def lives(fleet: Fleet, rounds: int) -> dict[str, Figure]:
    ours, bare = Stopwatch(), Stopwatch()
    async with fleet.agent() as agent:
        await remove(agent, await agent.start("first"))  # makes the template
        with bare_rounds(fleet) as bare_round:
            for number in range(rounds):
                print(f"bench: life {number + 1} of {rounds}", file=sys.stderr)
                for name, seconds in (await trio.to_thread.run_sync(bare_round)).items():
                    bare[name].append(seconds)
                await one_life(fleet, agent, f"life {number}", ours)
        heavy = await freeze_after_writing(fleet, agent)
    return {
        "start_vs_bare": ratio(ours["start"], bare["start"], "bare"),
        "freeze_vs_bare": ratio(ours["freeze"], bare["freeze"], "bare", after_1_gb_written_ms=ms(heavy)),
        "thaw_vs_bare": ratio(ours["thaw"], bare["thaw"], "bare"),
        "exec_vs_direct": ratio(ours["exec"], ours["direct"], "direct"),
    }


async def cold(fleet: Fleet, rounds: int) -> dict[str, Figure]:
    """Cold boots are those of boxes that come back from the archive."""
    watch = Stopwatch()
    async with fleet.agent() as agent:
        await remove(agent, await agent.start("first"))
        for number in range(min(rounds, COLD_BOOTS)):
            print(f"bench: cold boot {number + 1}", file=sys.stderr)
            with watch.time("start"):
                box = await agent.start(f"cold {number}")
            await change(fleet.node, box, "archive")
            with watch.time("boot"):
                await change(fleet.node, box, "restore")
            await remove(agent, box)
    return {"cold_vs_start": ratio(watch["boot"], watch["start"], "start")}


async def one_life(fleet: Fleet, agent: Agent, name: str, watch: Stopwatch) -> None:
    with watch.time("start"):
        box = await agent.start(name)
    async with direct(fleet, box) as guest:
        for number in range(EXECS):
            with watch.time("direct"):
                await guest.run(RunCommand(exec_id=f"direct{number}", cmd="true"), wait=20.0)
            with watch.time("exec"):
                await agent.run(box, "true")
    node = fleet.node
    with watch.time("freeze"):
        await change(node, box, "freeze")
    with watch.time("thaw"):
        await agent.run(box, "true")
    await remove(agent, box)


async def freeze_after_writing(fleet: Fleet, agent: Agent) -> float:
    """Seconds for a freeze when QEMU still has to write much of a GB that the guest has written."""
    print("bench: a freeze with 1 GB just written", file=sys.stderr)
    box, node, watch = await agent.start("writer"), fleet.node, Stopwatch()
    await agent.run(box, "dd if=/dev/zero of=/work/big bs=1M count=1024")
    with watch.time("freeze"):
        await change(node, box, "freeze")
    await remove(agent, box)
    return watch["freeze"][0]


@contextmanager
def bare_rounds(fleet: Fleet) -> Iterator[Any]:
    """A function that does one bare round from our newest template and returns its seconds by name."""
    template = max((fleet.state / "lib/node/templates").glob("core-1-*"), key=lambda path: path.stat().st_mtime)
    image = ImageStore(fleet.state / "lib/images").show(json.loads((template / "snapshot.json").read_text())["image"]).folder
    argv = [sys.executable, str(BARE), str(image), str(template)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        asks, answers = process.stdin, process.stdout

        def one() -> dict[str, float]:
            print(file=asks, flush=True)
            seconds: dict[str, float] = json.loads(answers.readline())
            return seconds

        yield one
        asks.close()


@asynccontextmanager
async def direct(fleet: Fleet, box: str) -> AsyncIterator[Guest]:
    """boxd of a running box, with nothing of ours between."""
    config = load_node_config(Places(fleet.state / "config.toml", fleet.state / "lib", fleet.state / "run"))
    token = json.loads((config.places.node / "journal" / f"{box}.json").read_text())["token"]
    network = await BoxNetwork.open(box, config)
    assert network, f"box {box} has no network"
    guest = Guest(network.connect, token=token)
    try:
        yield guest
    finally:
        guest.abort()
        network.close()


async def change(node: Api, box: str, what: str) -> None:
    """freeze, archive or restore, at the node's socket."""
    await trio.to_thread.run_sync(lambda: node.operate("POST", f"/v1/boxes/{box}/{what}", report=lambda message, fraction: None))


async def remove(agent: Agent, box: str) -> None:
    await agent.call("sandbox_stop", id=box, delete=True)
