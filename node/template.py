"""Templates: an image booted once, frozen when everything in it is up; every box of that image and size starts from it.

A template is kept under a key that names all that a saved state depends on (image, size, machine, accelerator, QEMU). It holds no process
with randomness or identity of its own; what is secret in it is its boxd's first token, which each start rotates at once. It is made anew
after `template_age`, since clones share their address-space layout (DESIGN "Start and thaw open to no one").
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import trio

from image.store import StoredImage
from node.errors import GuestError, VmError
from node.folder import Folder
from node.guest import Guest
from node.net import network
from node.net.network import BoxNetwork
from node.operations import Report
from node.storage import space
from node.vmm import snapshot
from node.vmm.command import kernel_line
from node.vmm.machine import Files, Machine
from node.workshop import Workshop

BOOT_WITHIN = 300.0  # seconds for a cold boot; emulated on busy cores it takes 20-60
SETTLE_AT_MOST = 15.0  # seconds for freed pages to leave the RAM file (free page reporting needs 2-6)
SETTLE_STEP = 1.0
HEALTH_EVERY = 0.2
TELL_EVERY = 5.0
UNDER_WAY = 3600.0  # seconds: a start that took the template just before its age was up has ended by then


@dataclass(frozen=True)
class Template:
    folder: Folder
    manifest: snapshot.Manifest
    token: str
    made_at: float

    @property
    def name(self) -> str:
        return self.folder.home.name


class Templates:
    """The folder of templates. One is made by the first start that needs it; others wait for the same making."""

    def __init__(self, workshop: Workshop, max_age: float) -> None:
        self._workshop, self._max_age = workshop, max_age
        self._home = workshop.config.places.node / "templates"
        self._run = workshop.config.places.run / "templates"
        self._making = trio.Lock()
        shutil.rmtree(self._home / "new", ignore_errors=True)  # cut short by a daemon that ended

    async def get(self, image: StoredImage, size: int, report: Report) -> Template:
        """The template for boxes of this image and size, made if there is none that is young enough (tens of seconds)."""
        if found := self.find(image, size):
            return found
        async with self._making:
            return self.find(image, size) or await self._make(image, size, report)

    def find(self, image: StoredImage, size: int) -> Template | None:
        key = self.key(image, size)
        known = [template for path in self._home.glob(f"{key}-*") if (template := self.open(path.name))]
        young = [template for template in known if time.time() - template.made_at < self._max_age]
        return max(young, key=lambda template: template.made_at, default=None)

    def open(self, name: str) -> Template | None:
        """The template of that name; None if it is gone or not complete."""
        folder = Folder(self._home / name, self._run / name)
        manifest = snapshot.read(folder.home)
        try:
            token = (folder.home / "token").read_text()
        except OSError:
            return None
        return Template(folder, manifest, token, folder.state.stat().st_mtime) if manifest else None

    def drop_unused(self, used: Collection[str]) -> None:
        """Removes what no start will take any more and no box lies on: templates past their age, and those of images that are gone."""
        images = {image.digest for image in self._workshop.images.list()}
        for path in self._home.glob("*-*-*"):
            template = self.open(path.name)
            fresh = template and time.time() - template.made_at < self._max_age + UNDER_WAY and template.manifest.image in images
            if path.name not in used and not fresh:
                shutil.rmtree(path, ignore_errors=True)

    def key(self, image: StoredImage, size: int) -> str:
        machine = self._workshop.machine(size)
        line = kernel_line(machine.accel, 0)  # without the host's TSC rate, which is measured and so never quite the same
        work = str(self._workshop.config.unit_work * size)
        parts = (image.digest, machine.machine_key, machine.accel, line, self._workshop.qemu.digest, work)
        return f"{image.flavour}-{size}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"

    async def _make(self, image: StoredImage, size: int, report: Report) -> Template:
        shop = self._workshop
        new = Folder(self._home / "new", self._run / "new")
        new.remove()
        new.make()
        spec, token, box_id = shop.machine(size), secrets.token_urlsafe(32), f"template{secrets.token_hex(2)}"
        async with AsyncExitStack() as undo:
            undo.callback(new.remove)
            undo.push_async_callback(shielded, lambda: network.remove(box_id, shop.config))
            report("preparing the template: disks and network", 0.0)
            (new.home / "token").touch(mode=0o600)
            (new.home / "token").write_text(token)
            await shop.blanks.overlay(new.disk, image.disk.stat().st_size)
            await shop.blanks.work(new.work, shop.config.unit_work * size)
            ram = shop.memory.create(new.home, spec.memory_mib << 20)
            net = await BoxNetwork.create(box_id, shop.config)
            undo.callback(net.close)
            files = Files(
                ram=ram,
                base=image.disk,
                overlays=(new.disk,),
                work=new.work,
                console=new.console,
                errors=new.errors,
                monitor=new.monitor,
                kernel=image.kernel,
                initrd=image.initrd,
                token=token.encode(),
            )
            machine = await shop.spawn(spec, files, net, f"template-{image.flavour}")
            undo.push_async_callback(shielded, machine.kill)
            guest = Guest(net.connect, token=token)
            began = trio.current_time()
            await wait_ready(guest, machine, lambda: report(f"first boot of the image: {trio.current_time() - began:.0f} s", None))
            report("letting the template settle", None)
            await guest.settle(drop_caches=True)
            await settled(ram)
            guest.abort()
            await machine.freeze(new.state)
            await shop.memory.rest(new.home)
            files_kept = (shop.memory.resting(new.home), new.disk, new.work)
            manifest = await trio.to_thread.run_sync(snapshot.make_durable, new.home, shop.manifest(spec, image.digest, 0), files_kept)
            name = f"{self.key(image, size)}-{secrets.token_hex(4)}"
            new.home.rename(self._home / name)
        report("the template is ready", 1.0)
        return Template(Folder(self._home / name, self._run / name), manifest, token, time.time())


async def wait_ready(guest: Guest, machine: Machine, tell: Callable[[], None], within: float = BOOT_WITHIN) -> None:
    """Until boxd says that everything is up. VmError when QEMU ends before, GuestError after `within` seconds."""
    told = trio.current_time()
    with trio.move_on_after(within):
        while True:
            if machine.exited.is_set():
                raise VmError("the VM ended during its boot", cause=machine.errors)
            try:
                if (await guest.status()).ready:
                    return
            except GuestError:
                pass
            if trio.current_time() >= told + TELL_EVERY:
                told = trio.current_time()
                tell()
            await trio.sleep(HEALTH_EVERY)
    raise GuestError(f"the guest is not up after {within:g} s")


async def settled(ram: Path) -> None:
    """Until the guest's freed pages have left the RAM file: it has stopped to shrink. Bounded, it only saves space and copying."""
    before = space.allocated_bytes(ram)
    for _ in range(int(SETTLE_AT_MOST / SETTLE_STEP)):
        await trio.sleep(SETTLE_STEP)
        now = space.allocated_bytes(ram)
        if abs(before - now) < 1 << 20:
            return
        before = now


async def shielded(step: Callable[[], Awaitable[object]]) -> None:
    with trio.CancelScope(shield=True):
        await step()

