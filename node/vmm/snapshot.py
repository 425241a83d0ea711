"""What a saved machine needs to come back: a manifest beside its state, written whole or not at all, and used once.

A snapshot is `state` (QEMU's, ~100 KB) and `snapshot.json` (the manifest) in a box's folder; RAM and disks lie beside them. A thaw
consumes it: `spend` removes both before the guest runs on, because from then on RAM and disk no longer fit the state. So a snapshot that
is there has not been spent. It lives through a crash of the host only if it was made durable before; through one of the daemon always.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from node.errors import StorageError

FORMAT = 1
STATE, MANIFEST = "state", "snapshot.json"
MAX_MANIFEST = 64 * 1024  # bytes


@dataclass(frozen=True)
class Manifest:
    generation: int
    qemu: str  # digest of the binary that saved
    qemu_version: str
    machine: str  # MachineSpec.machine_key
    accel: str
    kernel_line: str
    image: str  # digest
    memory_mib: int
    vcpus: int
    boot_id: str  # of the host's boot in which it was saved
    durable: bool = False
    format: int = FORMAT


# Field by field, and what a person calls it. The kernel line is the running guest's own and is judged as a part of a template's key.
MUST_MATCH = {
    "format": "snapshot format",
    "qemu": "QEMU build",
    "machine": "machine or CPU",
    "accel": "accelerator",
    "kernel_line": "kernel line",
    "image": "image",
    "memory_mib": "memory size",
    "vcpus": "number of CPUs",
}


def compatible(saved: Manifest, now: Manifest) -> str | None:
    """None if `saved` can be loaded by a machine made as `now` says; else why not. Pure."""
    if not saved.durable and saved.boot_id != now.boot_id:
        return "the host went down before the snapshot was safely on disk"
    for name, title in MUST_MATCH.items():
        was, is_now = getattr(saved, name), getattr(now, name)
        if was != is_now:
            return f"another {title}: saved with {was}, here is {is_now}"
    return None


def write(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest in `folder` atomically; a durable one reaches the disk before this returns.

    One that is not durable is good for this boot of the host only, so syncing it would buy nothing and cost a freeze its milliseconds.
    """
    new = folder / f".{MANIFEST}"
    try:
        with new.open("w") as file:
            json.dump(asdict(manifest), file, indent=1)
            if manifest.durable:
                file.flush()
                os.fsync(file.fileno())
        new.replace(folder / MANIFEST)
        if manifest.durable:
            sync(folder)
    except OSError as error:
        raise StorageError("the snapshot's manifest could not be written", cause=str(error)) from error


def read(folder: Path) -> Manifest | None:
    """The manifest of the snapshot in `folder`; None if there is no snapshot, it is spent, or it makes no sense."""
    try:
        with (folder / MANIFEST).open() as file:
            values = json.loads(file.read(MAX_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return None
    types = {f.name: {"int": int, "str": str, "bool": bool}[str(f.type)] for f in fields(Manifest)}
    if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != types or not (folder / STATE).exists():
        return None
    return Manifest(**values)


def spend(folder: Path) -> None:
    """After this no thaw from this snapshot is possible, also after a crash of the host, and nothing of it is left."""
    mark_spent(folder)
    drop_state(folder)


def drop_state(folder: Path) -> None:
    """Removes the state of a spent snapshot. If a crash of the host brings it back, it is without a manifest and so no snapshot."""
    (folder / STATE).unlink(missing_ok=True)


def mark_spent(folder: Path) -> None:
    """After this no thaw from this snapshot is possible, also after a crash of the host. Must be done before the guest runs."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        sync(folder)
    except OSError as error:
        raise StorageError("the snapshot could not be marked as spent", cause=str(error)) from error


def make_durable(folder: Path, manifest: Manifest, files: Iterable[Path]) -> Manifest:
    """Syncs RAM, disks (`files`) and state, then says so in the manifest. May take as long as the disk needs for the RAM; blocking."""
    try:
        for path in (*files, folder / STATE):
            sync(path)
        sync(folder)
    except OSError as error:
        raise StorageError("the snapshot could not be made durable", cause=str(error)) from error
    durable = replace(manifest, durable=True)
    write(folder, durable)
    return durable


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
