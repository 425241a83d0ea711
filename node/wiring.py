"""How the parts of a node are put together on this host, and in which order they go."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from image.store import ImageStore
from node.config import NodeConfig
from node.errors import NodeError
from node.host import Host, fitting_unit, memory_of_host
from node.microvm import QemuVms
from node.net.network import ensure_host_rules
from node.net.resolver import open_resolver
from node.storage.disk import Blanks
from node.storage.memory import memory
from node.template import Templates
from node.vmm import probe
from node.workshop import Workshop


@asynccontextmanager
async def open_host(config: NodeConfig, log: Callable[[str], None]) -> AsyncIterator[tuple[Host, QemuVms]]:
    """The host's facts and the hands that make microVMs on it. Leaving it lets go of running machines and ends none."""
    places = config.places
    images = ImageStore(places.images)
    memory_total = memory_of_host() - config.memory_reserve
    unit = config.unit_memory or fitting_unit(memory_total)
    accel = await trio.to_thread.run_sync(probe.choose_accel, config.accel, places)
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
