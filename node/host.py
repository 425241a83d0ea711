"""What this host is and has, found out once at the start of the daemon, and what all of its boxes share."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import trio

from image.store import ImageStore, StoredImage
from node.config import GIB, MIB, NodeConfig
from node.errors import ImageMissing, NodeError
from node.microvm import QemuVms
from node.net.network import ensure_host_rules
from node.net.resolver import open_resolver
from node.storage import space
from node.storage.disk import Blanks
from node.storage.memory import memory
from node.template import Templates
from node.vmm import probe
from node.workshop import Workshop

SMALLEST_UNIT, LARGEST_UNIT = 512 * MIB, 8 * GIB
DISK_RESERVE = 2 * GIB  # bytes that stay free: boxes grow while they run


@dataclass
class Host:
    """Facts for placement and for people. `problem` says why no box can run here, None when they can."""

    config: NodeConfig
    images: ImageStore
    memory_total: int  # bytes that boxes may use
    unit_memory: int
    cpus: int
    accel: Literal["kvm", "tcg", "unknown"]
    problem: NodeError | None = None
    node_id: str = field(default="")

    def image(self, flavour: str) -> StoredImage:
        """The newest image of the flavour; ImageMissing when none was built here."""
        if found := self.images.find(flavour):
            return found
        there = ", ".join(sorted({image.flavour for image in self.images.list()})) or "none"
        raise ImageMissing(f"no image of flavour {flavour!r} on this host", cause=f"flavours here: {there}")

    def disk_space(self) -> tuple[int, int]:
        """(total, free) bytes where boxes lie."""
        return space.total_bytes(self.config.places.lib), space.free_bytes(self.config.places.lib)


def memory_of_host() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise NodeError("/proc/meminfo has no MemTotal")


def fitting_unit(memory_total: int) -> int:
    """The size unit when configuration names none: the power of two of which four fit, from 512 MiB to 8 GiB."""
    unit = SMALLEST_UNIT
    while unit < LARGEST_UNIT and unit * 2 * 4 <= memory_total:
        unit *= 2
    return unit


@asynccontextmanager
async def open_host(config: NodeConfig, log: Callable[[str], None]) -> AsyncIterator[tuple[Host, QemuVms]]:
    """The host's facts and the hands that make microVMs on it. Leaving it lets go of running machines and ends none."""
    places = config.places
    images = ImageStore(places.images)
    memory_total = memory_of_host() - config.memory_reserve
    unit = config.unit_memory or fitting_unit(memory_total)
    accel = await trio.to_thread.run_sync(probe.choose_accel, config.accel, places.run)
    host = Host(config, images, memory_total, unit, os.cpu_count() or 1, accel.name)
    if accel.name == "tcg" and not config.development:
        host.problem = NodeError(
            "KVM does not work on this host, and the node is not marked as a development node",
            code="kvm_missing",
            cause=accel.why,
            remedy="Enable virtualisation in the firmware, or set node.development = true for trials.",
        )
    await ensure_host_rules(config)
    async with open_resolver(config.allow) as resolver, trio.open_nursery() as machines:
        workshop = Workshop(
            config=config,
            nursery=machines,
            blanks=Blanks(places.node / "blanks"),
            memory=memory(config.memory_backend, places.run / "memory"),
            accel=accel.name,
            cpu=accel.cpu,
            tsc_khz=await trio.to_thread.run_sync(probe.tsc_khz),
            qemu=await trio.to_thread.run_sync(probe.qemu_facts),
            unit_memory=unit,
            images=images,
        )
        templates = Templates(workshop, config.clocks.template_age)
        yield host, QemuVms(workshop, templates, resolver, trio.CapacityLimiter(config.parallel_starts), log)
        machines.cancel_scope.cancel()
