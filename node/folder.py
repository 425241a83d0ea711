"""The files of one box, or of one template: what lies where in its folder (0700)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from node.storage import space
from node.vmm import snapshot


@dataclass(frozen=True)
class Folder:
    """`home` survives a reboot; `run` holds the monitor's socket and does not."""

    home: Path
    run: Path

    @property
    def disk(self) -> Path:
        """The box's own overlay."""
        return self.home / "disk.qcow2"

    @property
    def work(self) -> Path:
        return self.home / "work.raw"

    @property
    def state(self) -> Path:
        return self.home / snapshot.STATE

    @property
    def console(self) -> Path:
        return self.home / "console.log"

    @property
    def errors(self) -> Path:
        return self.home / "qemu.log"

    @property
    def monitor(self) -> Path:
        return self.run / "qmp.sock"

    def make(self) -> None:
        for folder in (self.home, self.run):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove(self) -> None:
        for folder in (self.home, self.run):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def allocated(self) -> int:
        return space.allocated_bytes(self.home)
