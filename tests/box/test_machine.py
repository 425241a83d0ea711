"""One QEMU under the node's hands. Its guest is the image's kernel and initramfs, which wait for a root disk for ever: up in a second."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from image.store import ImageStore, StoredImage
from node.errors import VmError
from node.storage.disk import Blanks
from node.storage.memory import FileMemory
from node.vmm.command import MachineSpec, kernel_line
from node.vmm.machine import Files, Machine, bound
from node.vmm.probe import tsc_khz
from tests.box.fleet import images_folder

MIB = 1 << 20
DISK = 64 * MIB
Spawn = Callable[[MachineSpec, Files], Awaitable[Machine]]


@pytest.fixture
def image() -> StoredImage:
    found = ImageStore(images_folder()).find("core")
    assert found
    return found


@pytest.fixture
def spec() -> MachineSpec:
    return MachineSpec(memory_mib=256, vcpus=1, accel="tcg", kernel_line=kernel_line("tcg", tsc_khz(0.02)))


async def files(folder: Path, image: StoredImage) -> Files:
    """What a cold boot needs, in `folder`; the root disk is empty."""
    base, blanks = folder / "base", Blanks(folder / "blanks")
    base.touch()
    os.truncate(base, DISK)
    await blanks.overlay(folder / "disk", DISK)
    await blanks.work(folder / "work", 1 << 30)
    ram = FileMemory().create(folder, 256 * MIB)
    return Files(
        ram=ram, base=base, overlays=(folder / "disk",), work=folder / "work",
        console=folder / "console", errors=folder / "errors", monitor=folder / "monitor",
        kernel=image.kernel, initrd=image.initrd, token=b"secret",
    )  # fmt: skip


@asynccontextmanager
async def machines() -> AsyncIterator[Spawn]:
    """Spawns machines; none of them is left afterwards."""
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:

        async def spawn(spec: MachineSpec, given: Files) -> Machine:
            machine = await Machine.spawn(nursery, spec, given)
            stack.push_async_callback(machine.kill)
            return machine

        yield spawn


async def test_a_guest_freezes_and_thaws_twenty_times(tmp_path: Path, image: StoredImage, spec: MachineSpec) -> None:  # report 21
    given = await files(tmp_path, image)
    state = tmp_path / "state"
    async with machines() as spawn:
        machine = await spawn(spec, given)
        for _ in range(20):
            await machine.freeze(state)
            assert not Path(f"/proc/{machine.pid}").exists()
            assert state.stat().st_size < MIB
            machine = await spawn(spec, replace(given, state=state))
            await machine.load()
            state.unlink()  # spent
            assert await machine.status() == "paused"
            await machine.cont()
            assert await machine.status() == "running"


async def test_a_freeze_that_fails_leaves_a_running_guest_and_no_state(tmp_path: Path, image: StoredImage, spec: MachineSpec) -> None:
    async with machines() as spawn:
        machine = await spawn(spec, await files(tmp_path, image))
        with pytest.raises(VmError):
            await machine.freeze(tmp_path / "missing" / "state")
        assert await machine.status() == "running"
        await machine.freeze(tmp_path / "state")
        assert machine.exited.is_set()


@pytest.mark.parametrize("state", [b"", b"no state at all", os.urandom(64 * 1024)], ids=["empty", "text", "noise"])
async def test_a_state_that_is_none_is_refused_in_qemus_words(tmp_path: Path, image: StoredImage, spec: MachineSpec, state: bytes) -> None:
    (tmp_path / "state").write_bytes(state)
    given = replace(await files(tmp_path, image), state=tmp_path / "state")
    async with machines() as spawn:
        machine = await spawn(spec, given)
        with pytest.raises(VmError) as raised:
            await machine.load()
        assert raised.value.problem.cause


async def test_a_machine_that_cannot_start_says_why_and_leaves_no_process(tmp_path: Path, image: StoredImage, spec: MachineSpec) -> None:
    given = await files(tmp_path, image)
    async with trio.open_nursery() as nursery:
        with pytest.raises(VmError, match="missing cannot be opened"):
            await Machine.spawn(nursery, spec, replace(given, ram=tmp_path / "missing"))
        with pytest.raises(VmError) as raised:
            await Machine.spawn(nursery, replace(spec, cpu="max", vcpus=100_000), given)
        assert "100000" in raised.value.problem.cause


async def test_the_end_of_qemu_is_noticed_and_killing_it_again_does_nothing(tmp_path: Path, image: StoredImage, spec: MachineSpec) -> None:
    async with machines() as spawn:
        machine = await spawn(spec, await files(tmp_path, image))
        os.kill(machine.pid, signal.SIGKILL)
        await machine.exited.wait()
        assert machine.process.exit_code == -signal.SIGKILL
        await machine.kill()
        with pytest.raises(VmError):
            await machine.stop()


async def test_letting_go_of_a_machine_does_not_end_it(tmp_path: Path, image: StoredImage, spec: MachineSpec) -> None:
    given = await files(tmp_path, image)
    async with trio.open_nursery() as nursery:
        machine = await Machine.spawn(nursery, spec, given)
        nursery.cancel_scope.cancel()
    try:
        assert not machine.exited.is_set()
        assert Path(f"/proc/{machine.pid}/exe").exists()
    finally:
        machine.process.send_kill()
        await machine.process.wait()


def test_a_log_that_grew_too_long_keeps_its_end(tmp_path: Path) -> None:
    log = tmp_path / "console"
    with log.open("ab") as writer:
        writer.write(b"x" * 4000 + b"the end")
        writer.flush()
        bound(log, limit=400)
        assert log.read_bytes() == b"x" * 93 + b"the end"
        writer.write(b", and on")
    assert log.read_bytes().endswith(b"the end, and on")
