"""A node without QEMU: vms.MicroVms in memory, with guests that answer at once. A fake at a border, for tests of what is above it."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from image.store import ImageStore
from node.boxes import Boxes
from node.config import Clocks, NodeConfig, Places
from node.errors import GuestError, NodeError, VmError
from node.guest import Guest
from node.host import Host
from node.journal import BoxRecord
from node.operations import Report
from node.protocol import CommandView, GuestHealth, RunCommand

GIB = 1 << 30


class FakeGuest(Guest):
    """Commands end at once with 0, but `hang` runs until `end_commands`."""

    def __init__(self) -> None:
        self.known: dict[str, CommandView] = {}
        self.aborted = trio.Event()
        self.ended = trio.Event()
        self.settled = False

    async def health(self) -> GuestHealth:
        await trio.lowlevel.checkpoint()
        return GuestHealth(healthy=True, checked_at=0.0)

    async def run(self, request: RunCommand, *, wait: float = 0.0) -> CommandView:
        if request.exec_id not in self.known:
            running = request.cmd == "hang" or request.background
            self.known[request.exec_id] = CommandView(
                exec_id=request.exec_id,
                cmd=request.cmd,
                cwd=request.cwd,
                user=request.user,
                background=request.background,
                pid=42,
                running=running,
                started_at=0.0,
                ended_at=None if running else 1.0,
                exit_code=None if running else 0,
                signal=None,
                timed_out=False,
                end_reason=None if running else "exited",
                cpu_seconds=0.0,
            )
        return await self.command(request.exec_id, wait=wait)

    async def command(self, exec_id: str, *, wait: float = 0.0) -> CommandView:
        await trio.lowlevel.checkpoint()
        if self.known[exec_id].running and wait:
            with trio.move_on_after(wait):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._cancel_when, self.ended, nursery)
                    nursery.start_soon(self._cancel_when, self.aborted, nursery)
        if self.aborted.is_set():
            raise GuestError("the link was cut")
        return self.known[exec_id]

    async def commands(self) -> list[CommandView]:
        await trio.lowlevel.checkpoint()
        return list(self.known.values())

    async def settle(self, *, drop_caches: bool = False) -> None:
        await trio.lowlevel.checkpoint()
        self.settled = True

    def end_commands(self) -> None:
        self.known = {k: v.model_copy(update={"running": False, "exit_code": 0, "ended_at": 2.0}) for k, v in self.known.items()}
        self.ended.set()

    def abort(self) -> None:
        self.aborted.set()

    @staticmethod
    async def _cancel_when(event: trio.Event, nursery: trio.Nursery) -> None:
        await event.wait()
        nursery.cancel_scope.cancel()


@dataclass
class FakeVm:
    guest: FakeGuest
    pid: int
    pid_started: int = 7
    exited: trio.Event = field(default_factory=trio.Event)

    async def wait_exit(self) -> None:
        await self.exited.wait()

    def counters(self) -> tuple[int, int]:
        return 10, 20


class FakeVms:
    """`did` is what was asked of it, in order; `fail` names steps that raise, `gates` steps that wait."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.fail: dict[str, NodeError] = {}
        self.running: dict[str, FakeVm] = {}
        self.snapshots: set[str] = set()
        self.pids = itertools.count(1000)
        self.gates: dict[str, trio.Event] = {}

    async def _step(self, name: str, box: str) -> None:
        self.did.append(f"{name} {box}")
        if name in self.gates:
            await self.gates[name].wait()
        await trio.lowlevel.checkpoint()
        if name in self.fail:
            raise self.fail[name]

    def _begin(self, record: BoxRecord) -> tuple[BoxRecord, FakeVm]:
        self.running[record.id] = vm = FakeVm(FakeGuest(), next(self.pids))
        return replace(record, generation=record.generation + 1, token=secrets.token_hex(8)), vm

    async def start(self, record: BoxRecord, report: Report) -> tuple[BoxRecord, FakeVm]:
        report("starting", 0.5)
        await self._step("start", record.id)
        return self._begin(record)

    async def freeze(self, record: BoxRecord, running: FakeVm) -> BoxRecord:
        running.guest.abort()
        await self._step("freeze", record.id)
        self.snapshots.add(record.id)
        del self.running[record.id]
        return record

    async def flush(self, record: BoxRecord) -> None:
        await self._step("flush", record.id)

    async def mark_durable(self, record: BoxRecord) -> None:
        await self._step("durable", record.id)

    async def thaw(self, record: BoxRecord) -> tuple[BoxRecord, FakeVm]:
        await self._step("thaw", record.id)
        self.snapshots.remove(record.id)
        return self._begin(record)

    async def boot(self, record: BoxRecord, report: Report) -> tuple[BoxRecord, FakeVm]:
        await self._step("boot", record.id)
        return self._begin(replace(record, cold=True))

    async def end(self, running: FakeVm) -> None:
        running.exited.set()
        self.running = {box: vm for box, vm in self.running.items() if vm is not running}
        await trio.lowlevel.checkpoint()

    async def drop_memory(self, record: BoxRecord) -> None:
        self.snapshots.discard(record.id)
        await self._step("drop", record.id)

    async def destroy(self, record: BoxRecord) -> None:
        self.snapshots.discard(record.id)
        await self._step("destroy", record.id)

    async def adopt(self, record: BoxRecord) -> FakeVm:
        await self._step("adopt", record.id)
        if record.id not in self.running:
            raise VmError("its VM is gone")
        return self.running[record.id]

    async def sweep(self, record: BoxRecord) -> None:
        await self._step("sweep", record.id)

    async def drop_unused_templates(self, used: Collection[str]) -> None:
        await self._step("templates", ",".join(sorted(used)))

    def why_not_thawable(self, record: BoxRecord) -> NodeError | None:
        return None if record.id in self.snapshots else VmError("no snapshot")

    def console(self, record: BoxRecord) -> bytes:
        return b"console"


def make_host(folder: Path, *, memory_total: int = 16 * GIB, clocks: Clocks | None = None) -> Host:
    """A host with an image of flavour `core` in `folder`, and room for `memory_total` bytes of boxes."""
    places = Places(folder / "config.toml", folder / "lib", folder / "run")
    image = places.images / "core-0123456789ab"
    image.mkdir(parents=True, exist_ok=True)
    (image / "manifest.json").write_text('{"flavour": "core", "digest": "0123456789ab", "built_at": 1.0}')
    config = NodeConfig(places=places, clocks=clocks or Clocks(), memory_reserve=0)
    return Host(config, ImageStore(places.images), memory_total, GIB, 2, "tcg", node_id="node1")


@asynccontextmanager
async def open_boxes(host: Host, vms: FakeVms, log: Callable[[str], None] = lambda text: None) -> AsyncIterator[Boxes[FakeVm]]:
    """Boxes over a fake; leaving it is what a daemon's end is to them."""
    async with trio.open_nursery() as nursery:
        yield Boxes(host, vms, nursery, log)
        nursery.cancel_scope.cancel()
