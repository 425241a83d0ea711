"""What commands print, kept in files: the head and the tail of each stream under a quota (reports 1, 2, 10).

A spool is a row of segments. The first one, at the stream's plain path, holds the head and is never dropped; the ones behind it
carry their start offset in their name, and when they are too many the oldest goes. Offsets always count in the stream as it was
written, so a reader sees a gap as a jump. What lies on disk says everything: a restarted boxd finds its spools again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .protocol import OUTPUT_QUOTA

TOTAL_QUOTA = 1 << 30  # bytes of all spools together
TAIL_SEGMENTS = 4
CHUNK = 64 * 1024
QUIET = 0.2  # seconds without output after which an ended command's pipes count as drained
DRAIN_LIMIT = 1.0  # seconds, however much a background child goes on printing


@dataclass
class Budget:
    """The bytes that all spools may hold; `make_room` drops the output of the longest-ended command, False when there is none."""

    limit: int = TOTAL_QUOTA
    used: int = 0
    make_room: Callable[[], bool] = lambda: False

    def take(self, size: int) -> bool:
        while self.used + size > self.limit:
            if not self.make_room():
                return False
        self.used += size
        return True


@dataclass
class Segment:
    start: int
    path: Path
    size: int = 0

    @property
    def end(self) -> int:
        return self.start + self.size


class Spool:
    """One stream of one command. `total` counts what was written, `dropped` what was not kept."""

    def __init__(self, path: Path, budget: Budget, quota: int = OUTPUT_QUOTA) -> None:
        self.path = path
        self._budget = budget
        self._head_limit, self._tail_limit = quota // 2, quota // 2 // TAIL_SEGMENTS
        self._segments: list[Segment] = []
        self._fd = -1
        self.growth = asyncio.Event()  # set, and replaced by a new one, with the next write: take it before looking
        self.total = 0

    def recover(self, total: int = 0) -> None:
        """Finds the segments that a former boxd left; `total` as recorded, if it got to record it."""
        for found in sorted(self.path.parent.glob(f"{self.path.name}*")):
            start = found.name.removeprefix(self.path.name).removeprefix(".") or "0"
            if start.isdigit():
                self._segments.append(Segment(int(start), found, found.stat().st_size))
        self._budget.used += self.kept
        self.total = max(total, self._segments[-1].end if self._segments else 0)

    @property
    def kept(self) -> int:
        return sum(segment.size for segment in self._segments)

    @property
    def dropped(self) -> int:
        return self.total - self.kept

    def open(self) -> None:
        """The file is there before its first byte: an agent may follow it as soon as it knows the path."""
        self._writable()

    def write(self, data: bytes) -> None:
        """Never fails: what cannot be kept (quota, full disk) is counted as dropped."""
        view = memoryview(data)
        while view:
            segment = self._writable()
            limit = self._tail_limit if segment.start else self._head_limit
            piece = view[: limit - segment.size]
            if self._budget.take(len(piece)):
                written = self._append(piece)
                self._budget.used -= len(piece) - written
                segment.size += written
            self.total += len(piece)
            view = view[len(piece) :]
        self.wake()

    def _writable(self) -> Segment:
        """The last segment, or a new one where that is full or a hole lies behind it."""
        last = self._segments[-1] if self._segments else None
        if last and last.end == self.total and last.size < (self._tail_limit if last.start else self._head_limit):
            if self._fd < 0:
                self._fd = os.open(last.path, os.O_WRONLY | os.O_APPEND)
            return last
        self.close()
        if last and not last.size:
            self._drop(last)
        tails = [segment for segment in self._segments if segment.start]
        if len(tails) >= TAIL_SEGMENTS:
            self._drop(tails[0])
        path = self.path.with_name(f"{self.path.name}.{self.total:015d}") if self.total else self.path
        segment = Segment(self.total, path)
        with contextlib.suppress(OSError):  # the disk is full: the bytes will count as dropped
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._segments.append(segment)
        return segment

    def _append(self, piece: memoryview) -> int:
        try:
            return os.write(self._fd, piece)
        except OSError:
            return 0

    def _drop(self, segment: Segment) -> None:
        self._segments.remove(segment)
        self._budget.used -= segment.size
        segment.path.unlink(missing_ok=True)

    def read(self, offset: int, size: int = CHUNK) -> tuple[int, bytes]:
        """(true offset, bytes): the first kept bytes at or behind `offset`; no bytes at the end."""
        for segment in self._segments:
            if segment.end > max(offset, segment.start):
                start = max(offset, segment.start)
                with segment.path.open("rb") as file:
                    return start, os.pread(file.fileno(), min(size, segment.end - start), start - segment.start)
        return max(offset, self.total), b""

    def tail(self, size: int) -> bytes:
        """The last bytes, at most `size`, without a gap in them."""
        parts: list[bytes] = []
        offset = max(0, self.total - size)
        while offset < self.total:
            start, data = self.read(offset, size)
            if start > offset:
                parts.clear()
            parts.append(data)
            offset = start + len(data)
        return b"".join(parts)

    def wake(self) -> None:
        """Lets those look again who wait for growth."""
        grown, self.growth = self.growth, asyncio.Event()
        grown.set()

    def discard(self) -> None:
        """Drops all that is kept; the totals stay."""
        self.close()
        for segment in list(self._segments):
            self._drop(segment)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Pump:
    """Moves a pipe's bytes into a spool until the last writer is gone, also long after the command's shell has ended (report 4)."""

    def __init__(self, fd: int, spool: Spool) -> None:
        self._fd, self._spool = fd, spool
        self._loop = asyncio.get_running_loop()
        self.last = self._loop.time()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._move)

    def _move(self) -> None:
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        self.last = self._loop.time()
        if data:
            self._spool.write(data)
        else:
            self.close()

    def close(self) -> None:
        if not self.ended.done():
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._spool.close()
            self.ended.set_result(None)


async def drained(pumps: Iterable[Pump]) -> None:
    """After a shell has ended: waits for end of file, or QUIET seconds without output, or DRAIN_LIMIT."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while unfinished := [pump for pump in pumps if not pump.ended.done()]:
        quiet_at = max(start, *(pump.last for pump in unfinished)) + QUIET
        if (rest := min(quiet_at, start + DRAIN_LIMIT) - loop.time()) <= 0:
            return
        await asyncio.wait([pump.ended for pump in unfinished], timeout=rest)
