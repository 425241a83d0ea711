"""Where a box goes: one pure function, and what to do after a node failed to start it (report 69)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from coordinator.errors import ImageMissing, NoCapacity
from node.protocol import Hop, NodeView

Next = Literal["another_node", "exclude_node", "give_up"]
GIB = 1 << 30


@dataclass(frozen=True)
class Candidate:
    """A reachable node, as its last heartbeat told, and what was promised there since: sizes of starts that are under way."""

    view: NodeView
    promised: int = 0  # size units

    @property
    def free_memory(self) -> int:
        capacity = self.view.capacity
        return capacity.memory_total - capacity.memory_used - self.promised * capacity.unit_memory

    @property
    def free_vcpus(self) -> int:
        capacity = self.view.capacity
        return capacity.vcpus - capacity.vcpus_used - self.promised * capacity.unit_vcpus

    def promising(self, promises: Collection[tuple[str, str, int]]) -> Candidate:
        """With the room counted that (node, box, size) were promised here and that the node has not counted itself."""
        counted = {box.id for box in self.view.boxes}
        mine = sum(size for node, box, size in promises if node == self.view.id and box not in counted)
        return replace(self, promised=mine)

    def has(self, flavour: str) -> bool:
        return any(image.flavour == flavour for image in self.view.images)

    def fits(self, size: int) -> bool:
        capacity = self.view.capacity
        return self.free_memory >= size * capacity.unit_memory and self.free_vcpus >= size * capacity.unit_vcpus


def usable(nodes: Sequence[Candidate], *, development: bool) -> list[Candidate]:
    """Nodes that may run boxes: ready, and on TCG only where both the node and the fleet are marked as development."""
    return [n for n in nodes if n.view.ready and (n.view.accel == "kvm" or (n.view.development and development))]


def place(nodes: Sequence[Candidate], *, flavour: str, size: int, excluded: Collection[str], development: bool) -> str:
    """The id of the node for this box: of those that fit, the one with the most free memory.
    Raises NoCapacity, with what is free and what was asked for (report 71), or ImageMissing."""
    ready = usable(nodes, development=development)
    if not ready:
        raise NoCapacity("No node is ready", cause=_why_none(nodes))
    able = [n for n in ready if n.has(flavour)]
    if not able:
        there = sorted({image.flavour for n in ready for image in n.view.images})
        raise ImageMissing(f"No node has the image {flavour!r}", cause=f"Images there are: {', '.join(there) or 'none'}.")
    fitting = [n for n in able if n.view.id not in excluded and n.fits(size)]
    if not fitting:
        raise NoCapacity(f"No node has room for a box of size {size}{_need(able[0], size)}", cause=_limits(able, excluded))
    return max(fitting, key=lambda n: (n.free_memory, n.view.id)).view.id


def _need(node: Candidate, size: int) -> str:
    capacity = node.view.capacity
    return f" ({size * capacity.unit_memory / GIB:.1f} GiB, {size * capacity.unit_vcpus} vCPUs)"


def choose_flavour(nodes: Sequence[Candidate], *, asked: str | None, default: str, development: bool) -> str:
    """The flavour that was asked for, else the operator's default, else `full` where a node has it, else whatever is there."""
    if asked or default:
        return asked or default
    there = sorted({image.flavour for n in usable(nodes, development=development) for image in n.view.images})
    return "full" if "full" in there or not there else there[0]


def after_failure(code: str, hop: Hop) -> Next:
    """No room: another node now, and this one again later. The caller's own mistake: nowhere. Anything else: never this node again."""
    if code == "no_capacity":
        return "another_node"
    return "give_up" if hop == Hop.AGENT else "exclude_node"


def _why_none(nodes: Sequence[Candidate]) -> str:
    if not nodes:
        return "No node is connected."
    problems = [n.view.problem.message if n.view.problem else f"accel is {n.view.accel}" for n in nodes]
    return "; ".join(f"{n.view.id}: {problem}" for n, problem in zip(nodes, problems, strict=True)) + "."


def _limits(nodes: Sequence[Candidate], excluded: Collection[str]) -> str:
    parts = []
    for node in nodes:
        capacity, running = node.view.capacity, sum(box.state == "ready" for box in node.view.boxes)
        used = capacity.memory_total - node.free_memory
        parts.append(
            f"{node.view.id}: memory {used / GIB:.1f} of {capacity.memory_total / GIB:.1f} GiB used by {running} running boxes,"
            f" {capacity.vcpus - node.free_vcpus} of {capacity.vcpus} vCPUs, {capacity.disk_free / GIB:.1f} GiB of disk free"
            + (", refused it just now" if node.view.id in excluded else "")
        )
    return "; ".join(parts) + "."
