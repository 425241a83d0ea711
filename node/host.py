"""What this host is and has, found out once at the start of the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from image.boxd.protocol import REVISION
from image.store import ImageStore, StoredImage
from node.config import GIB, MIB, NodeConfig
from node.errors import ImageMissing, NodeError
from node.storage import space

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
        found = self.images.find(flavour)
        if found and found.manifest.get("boxd", REVISION) != REVISION:
            raise ImageMissing(f"image {flavour} {found.digest} holds a boxd that this node does not understand", code="image_outdated")
        if found:
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
