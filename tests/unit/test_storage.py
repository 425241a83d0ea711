"""Sparse copies, RAM files and disks, on the real file system."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import StorageError
from node.storage import space, sparse
from node.storage.disk import Blanks
from node.storage.memory import FileMemory, Memory, TmpfsMemory, memory

KIB, MIB = 1 << 10, 1 << 20


def sparse_file(path: Path, size: int, pieces: list[tuple[int, bytes]]) -> None:
    with path.open("wb") as file:
        for start, data in pieces:
            file.seek(start)
            file.write(data)
        file.truncate(size)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4 * MIB), st.binary(min_size=1, max_size=3000)), max_size=6), st.integers(0, 6 * MIB))
def test_a_copy_has_the_same_bytes_and_takes_no_more_room(pieces: list[tuple[int, bytes]], size: int) -> None:
    with TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        sparse_file(source, size, pieces)
        sparse.copy_now(source, target)
        assert target.read_bytes() == source.read_bytes()
        os.sync()  # blocks are dealt out at the latest now
        assert space.allocated_bytes(target) <= space.allocated_bytes(source) + 64 * KIB


async def test_a_copy_never_overwrites(tmp_path: Path) -> None:
    for name in ("source", "target"):
        (tmp_path / name).write_text(name)
    with pytest.raises(StorageError):
        await sparse.copy(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "target"


@pytest.fixture(params=["file", "tmpfs"])
def ram(request: pytest.FixtureRequest, tmp_path: Path) -> Memory:
    return memory(request.param, tmp_path / "tmpfs")


async def test_memory_goes_with_its_guest_through_freeze_and_thaw(ram: Memory, tmp_path: Path) -> None:
    template, box = tmp_path / "template", tmp_path / "box"
    for home in (template, box):
        home.mkdir()
    running = ram.create(template, 2 * MIB)
    assert running.stat().st_size == 2 * MIB
    assert space.allocated_bytes(running) == 0
    running.write_bytes(b"template")
    await ram.rest(template)
    running = await ram.clone(template, box)
    running.write_bytes(b"box")
    for _ in range(2):
        await ram.rest(box)
        assert ram.resting(box).read_bytes() == b"box"
        assert (await ram.wake(box)).read_bytes() == b"box"
    assert ram.resting(template).read_bytes() == b"template"
    ram.drop(box)
    ram.drop(box)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ram"]


def test_the_back_end_is_the_configured_one(tmp_path: Path) -> None:
    assert isinstance(memory("file", tmp_path), FileMemory)
    assert isinstance(memory("tmpfs", tmp_path), TmpfsMemory)


async def test_a_new_work_disk_is_a_large_file_system_of_few_bytes(tmp_path: Path) -> None:
    await Blanks(tmp_path / "blanks").work(tmp_path / "work", 40 << 30)
    assert (tmp_path / "work").stat().st_size == 40 << 30
    assert space.allocated_bytes(tmp_path) < 20 * MIB
    with (tmp_path / "work").open("rb") as disk:
        superblock = disk.read(4 * KIB)[1024:]
    assert superblock[56:58] == b"\x53\xef"
    assert superblock[120:124] == b"work"


async def test_a_new_overlay_names_no_backing_file(tmp_path: Path) -> None:
    blanks = Blanks(tmp_path / "blanks")
    for name in ("one", "two"):
        await blanks.overlay(tmp_path / name, 4 << 30)
    header = struct.unpack(">4sIQIIQ", (tmp_path / "two").read_bytes()[:32])
    assert header == (b"QFI\xfb", 3, 0, 0, 16, 4 << 30)
    assert [path.name for path in (tmp_path / "blanks").iterdir()] == [f"overlay-{4 << 30}.qcow2"]


async def test_a_disk_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"mkfs\.ext4 failed"):
        await Blanks(tmp_path / "blanks").work(tmp_path / "work", 1 << 10)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_room_is_counted_in_blocks_and_not_in_lengths(tmp_path: Path) -> None:
    sparse_file(tmp_path / "hole", 1 << 30, [])
    assert space.allocated_bytes(tmp_path / "hole") == 0
    assert space.allocated_bytes(tmp_path / "missing") == 0
    assert 0 < space.free_bytes(tmp_path) <= space.total_bytes(tmp_path)
