"""The real boxd on this host, one process for all tests of a module, and a node's Guest to speak with it."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import trio

from image.boxd.protocol import Restore
from node.guest import Guest
from node.protocol import RunCommand

FIRST_TOKEN = "the-first-token-from-fw-cfg"
TOKEN = "the-token-of-generation-1"
ids = count()


@dataclass(frozen=True)
class HostBoxd:
    port: int
    pid: int
    folder: Path

    def guest(self, token: str, generation: int = 0) -> Guest:
        async def connect(_port: int) -> trio.SocketStream:
            return await trio.open_tcp_stream("127.0.0.1", self.port)

        return Guest(connect, token=token, generation=generation)

    def rss(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024


@contextmanager
def running_boxd(folder: Path) -> Iterator[HostBoxd]:
    (folder / "token").write_text(FIRST_TOKEN)
    options = ["--host", "127.0.0.1", "--port", "0", "--state", folder / "state", "--authority", folder / "Xauthority"]
    command = [sys.executable, Path(__file__).with_name("boxd_on_host.py"), folder / "notes", *options, "--token-file", folder / "token"]
    with subprocess.Popen([*map(str, command), "--no-desktop"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield HostBoxd(int(process.stdout.readline().split()[1]), process.pid, folder)
        finally:
            process.kill()


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Waits for what the kernel or boxd does without telling anyone."""
    with trio.fail_after(20):
        while not await holds():  # noqa: ASYNC110 - no event comes
            await trio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int) -> bool:
    return not alive(pid)


def restore(generation: int = 1, token: str = TOKEN) -> Restore:
    return Restore(generation, token, base64.b64encode(os.urandom(64)).decode(), time.time())


@pytest.fixture(scope="module")
def boxd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostBoxd]:
    """Opened with TOKEN at generation 1."""

    async def open_it() -> None:
        guest = daemon.guest(FIRST_TOKEN)
        await guest.restore(restore())
        guest.abort()

    with running_boxd(tmp_path_factory.mktemp("boxd")) as daemon:
        trio.run(open_it)
        yield daemon


@pytest.fixture
async def guest(boxd: HostBoxd) -> AsyncIterator[Guest]:
    guest = boxd.guest(TOKEN, 1)
    yield guest
    guest.abort()


@pytest.fixture
def command() -> Callable[..., RunCommand]:
    """A RunCommand with an execId of its own, in /."""

    def make(cmd: str, **more: object) -> RunCommand:
        return RunCommand.model_validate({"exec_id": f"test-{next(ids)}", "cmd": cmd, "cwd": "/", **more})

    return make
