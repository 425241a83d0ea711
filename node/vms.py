"""What a box needs of microVMs, as Protocols: node/microvm.py has the real ones, tests have fakes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

from node.errors import NodeError
from node.guest import Guest
from node.journal import BoxRecord
from node.operations import Report


class Running(Protocol):
    """What a running microVM is to its box."""

    @property
    def guest(self) -> Guest: ...

    @property
    def pid(self) -> int: ...

    @property
    def pid_started(self) -> int: ...

    async def wait_exit(self) -> None:
        """Returns when QEMU is gone, for whatever reason."""

    def counters(self) -> tuple[int, int]:
        """(sent, received) bytes between the guest and the world since the network was made."""


R = TypeVar("R", bound=Running)


class MicroVms(Protocol[R]):
    """The sequences by which microVMs live; node/microvm.py has the real ones. Each either does all of it or undoes what it did."""

    async def start(self, record: BoxRecord, report: Report) -> tuple[BoxRecord, R]: ...

    async def freeze(self, record: BoxRecord, running: R) -> BoxRecord:
        """After it QEMU is gone and the state is saved; when it raises, the guest goes on."""

    async def flush(self, record: BoxRecord) -> None:
        """Writes what a freeze left to the disk for sure. Takes long; a thaw meanwhile is no harm."""

    async def mark_durable(self, record: BoxRecord) -> None:
        """The flushed snapshot survives a crash of the host from now on."""

    async def thaw(self, record: BoxRecord) -> tuple[BoxRecord, R]:
        """Uses the snapshot up before the guest runs. SnapshotIncompatible when it cannot be loaded here."""

    async def boot(self, record: BoxRecord, report: Report) -> tuple[BoxRecord, R]:
        """From the box's disk alone."""

    async def end(self, running: R) -> None:
        """Kills QEMU; the files stay."""

    async def drop_memory(self, record: BoxRecord) -> None:
        """Removes RAM, state and network; the disks stay."""

    async def destroy(self, record: BoxRecord) -> None:
        """Removes all that the box had; each step independent of the others."""

    async def adopt(self, record: BoxRecord) -> R:
        """The VM that outlived the daemon before; VmError when it is gone."""

    async def sweep(self, record: BoxRecord) -> None:
        """Ends a VM whose start or thaw an earlier daemon did not finish."""

    async def drop_unused_templates(self, used: Collection[str]) -> None:
        """`used`: the templates that boxes lie on."""

    def why_not_thawable(self, record: BoxRecord) -> NodeError | None:
        """None if the box's snapshot can be loaded here."""

    def console(self, record: BoxRecord) -> bytes: ...
