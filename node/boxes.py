"""All boxes of this node: who is there, what fits, whose clock has come."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Generic

import trio

from node.box import Box
from node.config import NodeConfig
from node.errors import BadRequest, BoxNotFound, NoCapacity, NodeError
from node.host import DISK_RESERVE, Host
from node.journal import BoxRecord, Journal
from node.operations import Operation, Operations, Report
from node.protocol import BOX_ID, BoxState, BoxView, Capacity, RunCommand, StartBox, WaitCommand, Wire
from node.vms import MicroVms, R

TICK = 1.0  # seconds between looks at the clocks
SWEEP = 3600.0  # seconds between looks for templates that nobody needs
OVERHEAD = 160 << 20  # bytes that QEMU needs beside the guest's memory: translated code, buffers


class Boxes(Generic[R]):
    """`nursery` runs all work; cancelling it stops the work where it is, which the journal then knows."""

    def __init__(self, host: Host, vms: MicroVms[R], nursery: trio.Nursery, log: Callable[[str], None]) -> None:
        self._host, self._vms, self._nursery, self._log = host, vms, nursery, log
        self._config: NodeConfig = host.config
        self._journal = Journal(self._config.places.node / "journal")
        self._operations = Operations(nursery, log)
        self._boxes: dict[str, Box[R]] = {}

    # ---- looking

    def get(self, box: str) -> Box[R]:
        try:
            return self._boxes[box]
        except KeyError:
            raise BoxNotFound(f"no box {box[:40]!r} on this node") from None

    def views(self) -> list[BoxView]:
        return [box.view(self._host.node_id) for box in self._boxes.values()]

    async def look(self, box: str) -> BoxView:
        """The box with its guest's health asked for now; never wakes."""
        await self.get(box).look()
        return self.get(box).view(self._host.node_id)

    def capacity(self) -> Capacity:
        config, host = self._config, self._host
        running = [box for box in self._boxes.values() if box.uses_memory]
        disk_total, disk_free = host.disk_space()
        return Capacity(
            memory_total=host.memory_total,
            memory_used=sum(self._memory(box.record.size) for box in running),
            disk_total=disk_total,
            disk_free=disk_free,
            vcpus=host.cpus * config.cpu_overcommit,
            vcpus_used=sum(box.record.size * config.unit_vcpus for box in running),
            unit_memory=host.unit_memory,
            unit_vcpus=config.unit_vcpus,
            unit_work=config.unit_work,
        )

    # ---- operations

    def start(self, box: str, request: StartBox) -> Operation:
        """A new box; a known id answers with the box as it is."""
        if self._host.problem:
            raise self._host.problem
        if not re.fullmatch(BOX_ID, box):
            raise BadRequest("a box id is 12 of [a-z0-9]", remedy="Choose another id.")
        return self._operations.join(f"{box}:start", partial(self._start, box, request))

    def change(self, box: str, change: str) -> Operation:
        """freeze, thaw, archive, restore or destroy."""
        known = self.get(box)
        work: dict[str, Callable[[Report], object]] = {
            "freeze": lambda report: known.freeze(),
            "thaw": known.thaw,
            "restore": known.thaw,
            "archive": lambda report: known.archive(),
            "destroy": lambda report: self._destroy(known),
        }
        return self._operations.join(f"{box}:{change}", partial(self._change, known, work[change]))

    def run(self, box: str, request: RunCommand) -> Operation:
        known = self.get(box)
        return self._operations.join(f"{box}:exec:{request.exec_id}", lambda report: known.run(request, report))

    def wait(self, box: str, exec_id: str, request: WaitCommand) -> Operation:
        known = self.get(box)
        key = f"{box}:wait:{secrets.token_hex(8)}"  # every wait has limits of its own
        return self._operations.join(key, lambda report: known.wait(exec_id, request))

    # ---- life of the daemon

    async def recover(self) -> None:
        """After a start of the daemon: takes back what still runs, undoes what was half made, says what was lost."""
        for record in self._journal.load():
            box = self._boxes[record.id] = self._make(record)
            if record.state is not BoxState.READY:
                await self._vms.sweep(record)
            if record.state is BoxState.STARTING:
                self._log(f"box {record.id}: its start was cut short and is undone")
                await self._destroy(box)
            elif record.state is BoxState.READY:
                try:
                    await box.adopt(await self._vms.adopt(record))
                except NodeError as error:
                    self._log(f"box {record.id}: {error}; it comes back cold from its disk")
                    box.forget_vm(error)
            elif record.state is BoxState.FROZEN and (lost := self._vms.why_not_thawable(record)):
                self._log(f"box {record.id}: {lost}; it comes back cold from its disk")
                box.forget_vm(lost)

    async def keep_clocks(self) -> None:
        """Freezes, archives and deletes on time, for ever, whoever else is there (report 64)."""
        swept = -SWEEP
        while True:
            for box in list(self._boxes.values()):
                if box.due(time.time()):
                    self._operations.join(f"{box.id}:clock", partial(self._act, box))
            if trio.current_time() - swept > SWEEP:
                swept = trio.current_time()
                await self._vms.drop_unused_templates({box.record.template for box in self._boxes.values()})
            await trio.sleep(TICK)

    async def rest(self) -> None:
        """Freezes every running box before the daemon stops, and puts all frozen ones on disk for sure: a reboot may follow."""
        async with trio.open_nursery() as nursery:
            for box in self._boxes.values():
                nursery.start_soon(self._rest, box)

    # ---- inside

    async def _start(self, box: str, request: StartBox, report: Report) -> Wire:
        if box not in self._boxes:
            image = self._host.image(request.flavour)
            now = time.time()
            record = BoxRecord(
                id=box,
                name=request.name[:60],
                state=BoxState.STARTING,
                flavour=request.flavour,
                size=request.size,
                image=image.digest,
                template="",
                machine_id=secrets.token_hex(16),
                hostname=f"box-{box}",
                created_at=now,
                state_since=now,
                last_call_at=now,
            )
            made = self._make(record)
            self._admit(made)
            self._boxes[box] = made
            try:
                await made.start(report)
            except BaseException:
                del self._boxes[box]
                raise
        return self.get(box).view(self._host.node_id)

    async def _change(self, box: Box[R], work: Callable[[Report], object], report: Report) -> Wire:
        await work(report)  # type: ignore[misc]
        return box.view(self._host.node_id)

    async def _destroy(self, box: Box[R]) -> None:
        await box.destroy()
        self._boxes.pop(box.id, None)

    async def _act(self, box: Box[R], report: Report) -> Wire:
        match await box.due_for_sure():
            case "freeze":
                await box.freeze(only_if_due=True)
            case "archive":
                await box.archive()
            case "delete":
                await self._destroy(box)
        return box.view(self._host.node_id)

    async def _rest(self, box: Box[R]) -> None:
        try:
            if box.state is BoxState.READY:
                await box.freeze()
        except NodeError as error:
            self._log(f"box {box.id}: not frozen at the end: {error}")
        await box.make_durable()

    def _make(self, record: BoxRecord) -> Box[R]:
        return Box(
            record,
            vms=self._vms,
            journal=self._journal,
            clocks=self._config.clocks,
            admit=self._admit,
            spawn=self._nursery.start_soon,
            log=self._log,
        )

    def _memory(self, size: int) -> int:
        return size * self._host.unit_memory + OVERHEAD

    def _admit(self, box: Box[R]) -> None:
        """Memory counts in full while running, CPUs overcommit, disk by what is really free (DESIGN "States and clocks")."""
        others = [other for other in self._boxes.values() if other is not box and other.uses_memory]
        memory = sum(self._memory(other.record.size) for other in others)
        vcpus = sum(other.record.size for other in others) * self._config.unit_vcpus
        needs = [
            ("memory", memory + self._memory(box.record.size), self._host.memory_total, "bytes"),
            ("vCPUs", vcpus + box.record.size * self._config.unit_vcpus, self._host.cpus * self._config.cpu_overcommit, ""),
            ("disk", DISK_RESERVE, self._host.disk_space()[1], "bytes free"),
        ]
        for what, needed, available, unit in needs:
            if needed > available:
                holders = ", ".join(other.id for other in others[:5]) or "none"
                raise NoCapacity(f"no room for box {box.id}: {what} {needed} of {available} {unit}", cause=f"held by {holders}")
