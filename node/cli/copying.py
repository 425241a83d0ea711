"""`box cp`: files and folders into a box and out of it, as a tar stream over an attached command. Modes and links are kept."""

from __future__ import annotations

import io
import posixpath
import shlex
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import trio

from image.boxd.protocol import FRAME_MAX, Frame
from node.cli.attach import Attached, Kept, attach
from node.cli.failure import Failure, NotFound, WrongUsage
from node.cli.unpack import unpack
from node.protocol import AttachBox

Counted = Callable[[int], None]  # hears of bytes as they are copied
TAR_CHANGED = 1  # GNU tar's exit code when a file changed while it was read: in a live box that is no failure


@dataclass(frozen=True)
class Copied:
    files: int
    target: str


def split_place(text: str) -> tuple[str | None, str]:
    """`box:/path` -> (box, path); a path of this host -> (None, path). `./a:b` is a path of this host."""
    box, colon, path = text.partition(":")
    if not colon or "/" in box or not box:
        return None, text
    return box, path or "/work"


async def copy_in(socket: Path, box: str, source: Path, target: str, counted: Counted) -> Copied:
    """Copies into the folder `target` if it is one, else as `target`."""
    source_name = _name_here(source)
    folder, name = (target, source_name) if await _kind(socket, box, target) == "folder" else _split(target)
    command = f"tar --extract --preserve-permissions --no-same-owner --file - --directory {shlex.quote(folder)}"
    problems = Kept()
    async with attach(socket, box, _spec(command)) as attached, trio.open_nursery() as nursery:
        packed: list[int] = []
        nursery.start_soon(_send_archive, attached, source, name, counted, packed)
        code = await attached.run(problems.take, problems.take)
        nursery.cancel_scope.cancel()
    if code:
        raise Failure(f"{source} could not be copied to {box}:{target}", cause=problems.text())
    return Copied(sum(packed), posixpath.join(folder, name))


async def copy_out(socket: Path, box: str, source: str, target: Path, counted: Counted) -> Copied:
    """Copies into the folder `target` if it is one, else as `target`."""
    if await _kind(socket, box, source) == "missing":
        raise NotFound(f"there is no {source} in the box")
    source_folder, source_name = _split(source)
    folder, name = _place_here(target, source_name)
    command = f"tar --create --file - --directory {shlex.quote(source_folder)} -- {shlex.quote(source_name)}"
    problems, pipe = Kept(), _Pipe()
    files: list[int] = []
    async with attach(socket, box, _spec(command)) as attached, trio.open_nursery() as nursery:
        nursery.start_soon(_unpack, pipe, folder, name, counted, files)
        code = await attached.run(pipe.put, problems.take)
        pipe.end()
    if code > TAR_CHANGED:
        raise Failure(f"{box}:{source} could not be copied", cause=problems.text())
    return Copied(sum(files), str(folder / name))


class _Pipe(io.RawIOBase):
    """Bytes from trio to a thread that reads them as a file; holds a few frames at most."""

    def __init__(self) -> None:
        super().__init__()
        self._send, self._receive = trio.open_memory_channel[bytes](4)
        self._rest = b""

    async def put(self, data: bytes) -> None:
        await self._send.send(data)

    def end(self) -> None:
        self._send.close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            try:
                self._rest = trio.from_thread.run(self._receive.receive)
            except trio.EndOfChannel:
                return 0
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


class _Outlet(io.RawIOBase):
    """A file for a thread whose bytes go to the command's stdin, frame by frame."""

    def __init__(self, attached: Attached) -> None:
        super().__init__()
        self._attached = attached

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        for start in range(0, len(data), FRAME_MAX):
            trio.from_thread.run(self._attached.send, Frame.STDIN, bytes(data[start : start + FRAME_MAX]))
        return len(data)


async def _send_archive(attached: Attached, source: Path, name: str, counted: Counted, packed: list[int]) -> None:
    await trio.to_thread.run_sync(partial(_pack, _Outlet(attached), source, name, counted, packed))
    await attached.send(Frame.STDIN)


def _pack(outlet: io.RawIOBase, source: Path, name: str, counted: Counted, packed: list[int]) -> None:
    def told(member: tarfile.TarInfo) -> tarfile.TarInfo:
        trio.from_thread.check_cancelled()
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        packed.append(not member.isdir())
        counted(member.size)
        return member

    with tarfile.open(fileobj=outlet, mode="w|", bufsize=FRAME_MAX, format=tarfile.PAX_FORMAT) as archive:
        archive.add(source, arcname=name, filter=told)


async def _unpack(pipe: _Pipe, folder: Path, name: str, counted: Counted, files: list[int]) -> None:
    reader = io.BufferedReader(pipe, FRAME_MAX)
    files.append(await trio.to_thread.run_sync(unpack, reader, folder, name, counted))
    await trio.to_thread.run_sync(_drain, reader)


def _drain(reader: IO[bytes]) -> None:
    while reader.read(FRAME_MAX):
        pass


async def _kind(socket: Path, box: str, path: str) -> str:
    """ "folder", "file" or "missing": what lies at a path in the box."""
    quoted = shlex.quote(path)
    kept = Kept()
    command = f"if [ -d {quoted} ]; then echo folder; elif [ -e {quoted} ] || [ -L {quoted} ]; then echo file; else echo missing; fi"
    async with attach(socket, box, _spec(command)) as attached:
        await attached.send(Frame.STDIN)
        await attached.run(kept.take, _ignore)
    return kept.text()


def _name_here(source: Path) -> str:
    """The name by which a copy of `source` goes; it must exist."""
    if not source.exists() and not source.is_symlink():
        raise NotFound(f"there is no {source} on this host")
    return _split(str(source if source.is_symlink() else source.resolve()))[1]


def _place_here(target: Path, name: str) -> tuple[Path, str]:
    """Folder and name of what will be made: inside of `target` if that is a folder, else `target` itself."""
    folder, name = (target, name) if target.is_dir() else (target.parent, target.name)
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder} on this host")
    return folder, name


async def _ignore(data: bytes) -> None:
    await trio.lowlevel.checkpoint()


def _split(path: str) -> tuple[str, str]:
    folder, name = posixpath.split(posixpath.normpath(path))
    if not name or name in (".", ".."):
        raise WrongUsage(f"{path} cannot be copied as a whole", remedy="Name a file or a folder below it.")
    return folder or ".", name


def _spec(command: str) -> AttachBox:
    return AttachBox(cmd=command, cwd="/work", user="root")


