"""Copying files that are mostly holes: a reflink where the file system can, else just the data, inside the kernel.

Measured on ext4 for 178 MiB of 1 GiB, quiet disk: sendfile 50-60 ms, copy_file_range 55-60 ms, read and write 65-75 ms, mmap 85-100 ms,
`cp --sparse=always` 60-75 ms; each up to 200 ms while the disk writes back.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import trio

from node.errors import StorageError

FICLONE = 0x40049409
NO_REFLINK = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY}
PIECE = 1 << 30  # bytes a sendfile, whose own limit is 2 GiB


async def copy(source: Path, target: Path, mode: int = 0o600) -> None:
    """`target` becomes a new file with the bytes of `source`, holes kept. Not cut short by a cancel; failed, there is no `target`.

    StorageError when it cannot be written (no space), or exists already.
    """
    try:
        await trio.to_thread.run_sync(copy_now, source, target, mode)
    except OSError as error:
        raise StorageError(f"{source.name} could not be copied to {target.parent.name}/{target.name}", cause=str(error)) from error


def copy_now(source: Path, target: Path, mode: int = 0o600) -> None:
    """The same, blocking."""
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            if not _reflink(reader, writer):
                _copy_data(reader, writer)
        except BaseException:
            target.unlink()
            raise
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def reflinks(folder: Path) -> bool:
    """Whether the file system under `folder` shares blocks between files (XFS, btrfs)."""
    source, target = (os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600) for _ in range(2))
    try:
        os.pwrite(source, b"x", 0)
        return _reflink(source, target)
    finally:
        os.close(source)
        os.close(target)


def data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The file's ranges that are not holes, as (start, end)."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only holes from here
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


def _reflink(reader: int, writer: int) -> bool:
    try:
        fcntl.ioctl(writer, FICLONE, reader)
    except OSError as error:
        if error.errno in NO_REFLINK:
            return False
        raise
    return True


def _copy_data(reader: int, writer: int) -> None:
    size = os.fstat(reader).st_size
    os.ftruncate(writer, size)
    for start, end in data(reader, size):
        at = os.lseek(writer, start, os.SEEK_SET)
        while at < end and (sent := os.sendfile(writer, reader, at, min(PIECE, end - at))):  # 0: the source shrank
            at += sent
