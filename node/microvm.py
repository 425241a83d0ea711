"""The sequences by which a microVM starts, freezes, thaws, boots and ends. Each does all of it, or undoes what it did.

    start   copy the template's RAM, lay an overlay over its disk, make the network; load, run, restore
    freeze  cut the links into the guest, stop, save, kill; what is on disk is made durable afterwards
    thaw    load; from here on the snapshot is spent; run, restore
    boot    a new guest on the box's disks: processes of before are gone

"restore" is the one request that opens a guest: new randomness, the right clock, a new token, after a start or boot also its identity.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import trio

from image.boxd.protocol import Restore
from node.errors import ImageMissing, NodeError, SnapshotIncompatible, VmError
from node.folder import Folder
from node.guest import Guest
from node.journal import BoxRecord
from node.net import network
from node.net.network import BoxNetwork
from node.net.resolver import Resolver
from node.operations import Report
from node.template import Template, Templates, shielded, wait_ready
from node.together import together
from node.vmm import snapshot
from node.vmm.command import MachineSpec
from node.vmm.machine import Files, Machine, end_stray
from node.vmm.process import start_ticks
from node.workshop import Workshop

CONSOLE_TAIL = 256 << 10  # bytes
CLOCK_WITHIN, CLOCK_TRIES = 1.0, 3  # seconds: the guest's clock when it is opened (report 14)
T = TypeVar("T")


class Later(Generic[T]):
    """What a task started in `nursery` returns; `value` is there once the nursery has ended."""

    value: T

    def __init__(self, nursery: trio.Nursery, function: Callable[..., Awaitable[T]], *args: object) -> None:
        async def run() -> None:
            self.value = await function(*args)

        nursery.start_soon(run)


@dataclass
class RunningVm:
    """A running guest with all that belongs to it; vms.Running in the flesh."""

    machine: Machine
    net: BoxNetwork
    guest: Guest
    pid_started: int

    @property
    def pid(self) -> int:
        return self.machine.pid

    async def wait_exit(self) -> None:
        await self.machine.exited.wait()

    def counters(self) -> tuple[int, int]:
        counted = self.net.counters()
        return counted.sent_bytes, counted.received_bytes


class QemuVms:
    """vms.MicroVms with QEMU. `limiter` is the one for starts, thaws and boots of the node."""

    def __init__(
        self, workshop: Workshop, templates: Templates, resolver: Resolver, limiter: trio.CapacityLimiter, log: Callable[[str], None]
    ) -> None:
        self._shop, self._templates, self._resolver, self._limiter, self._log = workshop, templates, resolver, limiter, log

    def folder(self, box: str) -> Folder:
        places = self._shop.config.places
        return Folder(places.node / "boxes" / box, places.run / "boxes" / box)

    async def start(self, record: BoxRecord, report: Report) -> tuple[BoxRecord, RunningVm]:
        image = self._shop.image(record.image)
        template = await self._templates.get(image, record.size, report)
        folder, spec = self.folder(record.id), self._shop.machine(record.size)
        record = replace(record, template=template.name, x_cookie=secrets.token_hex(16))
        async with self._limiter, AsyncExitStack() as undo:
            report("starting from the template", None)
            folder.make()
            async with together() as copies:  # side by side: the kernel waits for different things
                net = Later(copies, BoxNetwork.create, record.id, self._shop.config)
                ram = Later(copies, self._shop.memory.clone, template.folder.home, folder.home)
                copies.start_soon(trio.to_thread.run_sync, copy_console, template.folder, folder)
                copies.start_soon(self._shop.blanks.overlay, folder.disk, image.disk.stat().st_size)
                copies.start_soon(self._shop.blanks.work, folder.work, self._shop.config.unit_work * record.size)
            files = self._files(record, template.folder, ram.value, state=template.folder.state)
            running = await self._load(record, spec, files, net.value, template.token, undo)
            opened = await self._restore(record, running, fresh=True)
            undo.pop_all()
            return opened, running

    async def freeze(self, record: BoxRecord, running: RunningVm) -> BoxRecord:
        folder = self.folder(record.id)
        running.guest.abort()
        await running.machine.freeze(folder.state)
        await self._leave(record.id, running)
        await self._shop.memory.rest(folder.home)
        manifest = self._shop.manifest(self._shop.machine(record.size), record.image, record.generation)
        snapshot.write(folder.home, manifest)
        return record

    async def flush(self, record: BoxRecord) -> None:
        folder = self.folder(record.id)
        for path in (self._shop.memory.resting(folder.home), folder.disk, folder.work, folder.state):
            with suppress(FileNotFoundError):  # thawed or destroyed meanwhile
                await trio.to_thread.run_sync(snapshot.sync, path)

    async def mark_durable(self, record: BoxRecord) -> None:
        folder = self.folder(record.id)
        if manifest := snapshot.read(folder.home):
            await trio.to_thread.run_sync(snapshot.write, folder.home, replace(manifest, durable=True))

    async def thaw(self, record: BoxRecord) -> tuple[BoxRecord, RunningVm]:
        if reason := self.why_not_thawable(record):
            raise reason
        folder, spec, template = self.folder(record.id), self._shop.machine(record.size), self._template(record)
        async with self._limiter, AsyncExitStack() as undo:
            ram = await self._shop.memory.wake(folder.home)
            net = await self._network(record.id)
            files = self._files(record, template.folder, ram, state=folder.state)
            running = await self._load(record, spec, files, net, record.token, undo, spend=folder.home)
            opened = await self._restore(record, running, fresh=False)
            undo.pop_all()
            return opened, running

    async def boot(self, record: BoxRecord, report: Report) -> tuple[BoxRecord, RunningVm]:
        image, template = self._shop.image(record.image), self._template(record)
        folder, spec = self.folder(record.id), self._shop.machine(record.size)
        token = secrets.token_urlsafe(32)
        async with self._limiter, AsyncExitStack() as undo:
            folder.make()
            net = await self._network(record.id)
            ram = self._shop.memory.create(folder.home, spec.memory_mib << 20)
            files = replace(self._files(record, template.folder, ram), kernel=image.kernel, initrd=image.initrd, token=token.encode())
            machine = await self._shop.spawn(spec, files, net, f"box-{record.id}")
            running = await self._own(record.id, machine, net, token, record.generation, undo)
            began = trio.current_time()
            await wait_ready(running.guest, machine, lambda: report(f"booting: {trio.current_time() - began:.0f} s", None))
            opened = await self._restore(replace(record, cold=True), running, fresh=True)
            undo.pop_all()
            return opened, running

    async def adopt(self, record: BoxRecord) -> RunningVm:
        net = await BoxNetwork.open(record.id, self._shop.config)
        if net is None or record.pid is None:
            raise VmError(f"box {record.id} has no VM any more")
        folder = self.folder(record.id)
        try:
            files = self._files(record, self._template(record).folder, self._shop.memory.resting(folder.home))
            machine = await Machine.adopt(self._shop.nursery, record.pid, record.pid_started, files)
            snapshot.spend(folder.home)  # of a freeze that was cut short
            async with AsyncExitStack() as undo:
                running = await self._own(record.id, machine, net, record.token, record.generation, undo)
                undo.pop_all()
        except BaseException:
            net.close()
            raise
        return running

    async def drop_unused_templates(self, used: Collection[str]) -> None:
        await trio.to_thread.run_sync(self._templates.drop_unused, used)

    async def sweep(self, record: BoxRecord) -> None:
        await end_stray(self.folder(record.id).monitor)

    async def end(self, running: RunningVm) -> None:
        running.guest.abort()
        await running.machine.kill()
        await self._leave(running.net.box_id, running)

    async def drop_memory(self, record: BoxRecord) -> None:
        folder = self.folder(record.id)
        snapshot.spend(folder.home)
        self._shop.memory.drop(folder.home)
        await network.remove(record.id, self._shop.config)

    async def destroy(self, record: BoxRecord) -> None:
        folder, failed = self.folder(record.id), list[NodeError]()
        try:
            await network.remove(record.id, self._shop.config)
        except NodeError as error:
            failed.append(error)
        self._shop.memory.drop(folder.home)
        await trio.to_thread.run_sync(folder.remove)
        if failed:
            raise failed[0]

    def console(self, record: BoxRecord) -> bytes:
        """The last CONSOLE_TAIL bytes of what the guest wrote to its serial port."""
        try:
            with self.folder(record.id).console.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - CONSOLE_TAIL))
                return file.read(CONSOLE_TAIL)
        except FileNotFoundError:
            return b""

    def why_not_thawable(self, record: BoxRecord) -> SnapshotIncompatible | None:
        """None if the box's snapshot can be loaded here."""
        saved = snapshot.read(self.folder(record.id).home)
        if saved is None:
            return SnapshotIncompatible("there is no snapshot to thaw from: it was spent or never finished")
        now = replace(self._shop.manifest(self._shop.machine(record.size), record.image, record.generation), kernel_line=saved.kernel_line)
        why = snapshot.compatible(saved, now)
        return SnapshotIncompatible("the snapshot does not fit this host any more", cause=why) if why else None

    # ---- parts of the sequences

    async def _load(
        self,
        record: BoxRecord,
        spec: MachineSpec,
        files: Files,
        net: BoxNetwork,
        token: str,
        undo: AsyncExitStack,
        spend: Path | None = None,
    ) -> RunningVm:
        """A saved guest that runs again. `spend` is the folder whose snapshot is used up by it."""
        async with together() as steps:
            if spend:  # beside QEMU's start: the disk takes its time, and a load that fails leads to a cold boot anyway
                steps.start_soon(trio.to_thread.run_sync, snapshot.mark_spent, spend)
            machine = await self._shop.spawn(spec, files, net, f"box-{record.id}")
            running = await self._own(record.id, machine, net, token, record.generation, undo)
            await machine.load()
        if spend:
            snapshot.drop_state(spend)
        await machine.cont()
        return running

    async def _own(self, box: str, machine: Machine, net: BoxNetwork, token: str, generation: int, undo: AsyncExitStack) -> RunningVm:
        await self._resolver.add_box(box, net.dns_sockets())
        guest = Guest(net.connect, token=token, generation=generation)
        running = RunningVm(machine, net, guest, start_ticks(machine.pid) or 0)
        undo.push_async_callback(shielded, lambda: self.end(running))
        return running

    async def _restore(self, record: BoxRecord, running: RunningVm, *, fresh: bool) -> BoxRecord:
        """Opens the guest; after it, only the new token is accepted. Returns the record that knows it."""
        record = replace(record, generation=record.generation + 1, token=secrets.token_urlsafe(32))
        wanted = Restore(
            generation=record.generation,
            token=record.token,
            entropy="",
            realtime=0.0,
            machine_id=record.machine_id if fresh else None,
            hostname=record.hostname if fresh else None,
            mount_work=fresh,
            x_cookie=record.x_cookie if fresh else None,
        )
        for _ in range(CLOCK_TRIES):  # the first may be seconds on its way into a guest that has just begun to run on a crowded host
            entropy = base64.b64encode(os.urandom(64)).decode()
            restored = await running.guest.restore(replace(wanted, entropy=entropy, realtime=time.time()))
            if abs(time.time() - restored.realtime) < CLOCK_WITHIN:
                break
        return record

    async def _leave(self, box: str, running: RunningVm) -> None:
        """Lets go of a VM that is gone; its network stays."""
        await self._resolver.remove_box(box)
        running.net.close()

    async def _network(self, box: str) -> BoxNetwork:
        """The network that was kept, or a new one."""
        if found := await BoxNetwork.open(box, self._shop.config):
            return found
        await network.remove(box, self._shop.config)
        return await BoxNetwork.create(box, self._shop.config)

    def _template(self, record: BoxRecord) -> Template:
        if template := self._templates.open(record.template):
            return template
        raise ImageMissing(
            f"the template {record.template} of box {record.id} is gone",
            code="template_missing",
            remedy="The box's disk cannot be used without it: delete the box.",
        )

    def _files(self, record: BoxRecord, template: Folder, ram: Path, state: Path | None = None) -> Files:
        folder = self.folder(record.id)
        return Files(
            ram=ram,
            base=self._shop.image(record.image).disk,
            overlays=(template.disk, folder.disk),
            work=folder.work,
            console=folder.console,
            errors=folder.errors,
            monitor=folder.monitor,
            state=state,
        )


def copy_console(template: Folder, box: Folder) -> None:
    """A box's console begins with the boot that it shares with its template."""
    with suppress(FileNotFoundError):
        shutil.copyfile(template.console, box.console)
        box.console.chmod(0o600)
