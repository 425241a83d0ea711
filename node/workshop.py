"""What it takes to make a microVM on this host: the machine's shape, blanks, memory, and a QEMU started in a box's network."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import trio

from image.store import ImageNotFoundError, ImageStore, StoredImage
from node.config import NodeConfig
from node.errors import ImageMissing
from node.net.network import BoxNetwork
from node.storage.disk import Blanks
from node.storage.memory import Memory
from node.vmm import snapshot
from node.vmm.command import Accel, MachineSpec, kernel_line
from node.vmm.machine import Files, Machine
from node.vmm.probe import QemuFacts

MIB = 1 << 20


@dataclass(frozen=True)
class Workshop:
    """`nursery` holds the tasks of machines; cancelling it lets go of them and ends none."""

    config: NodeConfig
    nursery: trio.Nursery
    blanks: Blanks
    memory: Memory
    accel: Accel
    cpu: str
    tsc_khz: int
    qemu: QemuFacts
    unit_memory: int  # bytes of one size unit
    images: ImageStore

    def image(self, digest: str) -> StoredImage:
        """ImageMissing when it is gone: boxes need theirs for as long as they exist."""
        try:
            return self.images.show(digest)
        except ImageNotFoundError as error:
            raise ImageMissing(f"the image {digest} is not on this host any more") from error

    def machine(self, size: int) -> MachineSpec:
        return MachineSpec(
            memory_mib=size * self.unit_memory // MIB,
            vcpus=size * self.config.unit_vcpus,
            accel=self.accel,
            kernel_line=kernel_line(self.accel, self.tsc_khz),
            cpu=self.cpu,
        )

    def manifest(self, spec: MachineSpec, image: str, generation: int) -> snapshot.Manifest:
        return snapshot.Manifest(
            generation=generation,
            qemu=self.qemu.digest,
            qemu_version=self.qemu.version,
            machine=spec.machine_key,
            accel=spec.accel,
            kernel_line=spec.kernel_line,
            image=image,
            memory_mib=spec.memory_mib,
            vcpus=spec.vcpus,
            boot_id=snapshot.boot_id(),
        )

    async def spawn(self, spec: MachineSpec, files: Files, net: BoxNetwork, name: str) -> Machine:
        """QEMU on the box's tap. Our own descriptor of the tap is closed again: a tap has one user."""
        tap = net.open_tap()
        try:
            return await Machine.spawn(self.nursery, spec, replace(files, tap=tap), name=name)
        finally:
            os.close(tap)
