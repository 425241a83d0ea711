"""Where the RAM files of guests live, and nothing else knows it.

Each guest has a home, the folder of its box or template. Two back ends with one interface:
    FileMemory    home/ram, beside the disks. Survives a reboot by itself; a busy guest's pages are written back to disk as it runs.
    TmpfsMemory   <folder on tmpfs>/<home's name>.ram while it runs, home/ram while it is frozen. No write-back; freeze and thaw copy.
`create`, `clone` and `wake` give the path to run from; `rest` is called after a freeze, before `wake`; `drop` forgets all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import trio

from node.errors import StorageError
from node.storage import sparse


class Memory(Protocol):
    def create(self, home: Path, size: int) -> Path:
        """An empty RAM file of `size` bytes for a cold boot; an old one is replaced."""
        ...

    async def clone(self, source: Path, home: Path) -> Path:
        """A copy of the rested memory of the home `source` (a template). Failed, nothing is left."""
        ...

    async def rest(self, home: Path) -> None:
        """The guest is frozen: its memory goes to where it may stay long. On a failure it stays where it is."""
        ...

    async def wake(self, home: Path) -> Path:
        """The guest is about to be thawed."""
        ...

    def resting(self, home: Path) -> Path:
        """The file that `rest` left, for fsync and accounts."""
        ...

    def drop(self, home: Path) -> None:
        """No memory of this guest is left anywhere; nothing happens if there was none."""
        ...


class FileMemory:
    def create(self, home: Path, size: int) -> Path:
        return _empty(home / "ram", size)

    async def clone(self, source: Path, home: Path) -> Path:
        await sparse.copy(source / "ram", home / "ram")
        return home / "ram"

    async def rest(self, home: Path) -> None:
        pass

    async def wake(self, home: Path) -> Path:
        return home / "ram"

    def resting(self, home: Path) -> Path:
        return home / "ram"

    def drop(self, home: Path) -> None:
        (home / "ram").unlink(missing_ok=True)


class TmpfsMemory:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, home: Path, size: int) -> Path:
        return _empty(self._running(home), size)

    async def clone(self, source: Path, home: Path) -> Path:
        await sparse.copy(source / "ram", self._running(home))
        return self._running(home)

    async def rest(self, home: Path) -> None:
        await _move(self._running(home), home / "ram")

    async def wake(self, home: Path) -> Path:
        await _move(home / "ram", self._running(home))
        return self._running(home)

    def resting(self, home: Path) -> Path:
        return home / "ram"

    def drop(self, home: Path) -> None:
        for path in (self._running(home), home / "ram"):
            path.unlink(missing_ok=True)

    def _running(self, home: Path) -> Path:
        return self._folder / f"{home.name}.ram"


def memory(backend: str, tmpfs: Path) -> Memory:
    """The back end that configuration names: `file` or `tmpfs` (whose files lie in the folder `tmpfs`)."""
    if backend == "tmpfs":
        tmpfs.mkdir(mode=0o700, parents=True, exist_ok=True)
        return TmpfsMemory(tmpfs)
    return FileMemory()


def _empty(path: Path, size: int) -> Path:
    path.unlink(missing_ok=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError("no RAM file could be made", cause=str(error)) from error
    return path


async def _move(source: Path, target: Path) -> None:
    """Over the border of file systems; one of the two is whole at any time. Not cut short by a cancel."""

    def move() -> None:
        target.unlink(missing_ok=True)
        sparse.copy_now(source, target)
        source.unlink()

    try:
        await trio.to_thread.run_sync(move)
    except OSError as error:
        raise StorageError("a RAM file could not be moved", cause=str(error)) from error
