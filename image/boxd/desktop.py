"""The virtual display: Xvfb on :99 with its cookie, and a window manager; both come back by themselves when they are killed."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import shutil
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from .processes import Account, Processes, environment

DISPLAY = ":99"
SCREEN = "1280x800x24"
SOCKET = Path("/tmp/.X11-unix/X99")  # noqa: S108 - where every X server has it
WINDOW_MANAGERS = ("openbox", "matchbox-window-manager", "icewm", "jwm", "fluxbox", "twm")
FAMILY_WILD = 0xFFFF  # of Xauth.h: the cookie opens the display whatever the address
LONGEST_PAUSE = 30.0  # seconds between two starts of a program that keeps ending
STEADY = 60.0  # seconds up after which the pauses begin anew


class Desktop:
    def __init__(self, processes: Processes, authority: Path) -> None:
        self._processes, self._authority = processes, authority
        self.variables = {"DISPLAY": DISPLAY, "XAUTHORITY": str(authority)}
        self._manager = next((name for name in WINDOW_MANAGERS if shutil.which(name)), None)
        self._server = bool(shutil.which("Xvfb"))
        self._up = {"server": False, "manager": self._manager is None}

    @property
    def state(self) -> str:
        if not self._server:
            return "down"
        return "up" if all(self._up.values()) and SOCKET.exists() else "starting"

    @property
    def settled(self) -> bool:
        """Up, or not part of this image."""
        return self.state == "up" or not self._server

    async def run(self) -> None:
        """Keeps both programs running, until cancelled."""
        if not self._server:
            return
        if not self._authority.exists():
            self.set_cookie(os.urandom(16))
        server = ["Xvfb", DISPLAY, "-screen", "0", SCREEN, "-listen", "tcp", "-noreset", "-auth", str(self._authority)]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_up("server", server))
            if self._manager:
                group.create_task(self._keep_up("manager", [self._manager]))

    def set_cookie(self, cookie: bytes) -> None:
        """Writes the authority file anew: clients use it from now on, and Xvfb reads it again because its time is newer."""
        before = self._authority.stat().st_mtime if self._authority.exists() else 0.0
        self._authority.parent.mkdir(parents=True, exist_ok=True)
        draft = self._authority.with_suffix(".new")
        draft.touch(mode=0o640)
        draft.write_bytes(authority_entry(cookie))
        with contextlib.suppress(KeyError):
            os.chown(draft, 0, grp.getgrnam("tester").gr_gid)
        newer = max(time.time(), before + 1)  # Xvfb compares whole seconds
        os.utime(draft, (newer, newer))
        draft.replace(self._authority)

    async def _keep_up(self, part: str, argv: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        root = Account.named("root")
        pause = 0.25
        while True:
            if part == "manager":
                await self._display_there()
            started = loop.time()
            process = self._processes.spawn(argv, account=root, env=environment(root, self.variables, {}))
            self._up[part] = True
            await process.wait()
            self._up[part] = False
            pause = 0.25 if loop.time() - started > STEADY else min(pause * 2, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _display_there(self) -> None:
        while not (self._up["server"] and SOCKET.exists()):  # noqa: ASYNC110 - a socket's birth sends no event
            await asyncio.sleep(0.1)


def authority_entry(cookie: bytes) -> bytes:
    """An Xauthority file of one entry: family, address, display number, protocol, cookie, each with a 16-bit length (Xau(3))."""
    fields = (b"", DISPLAY.removeprefix(":").encode(), b"MIT-MAGIC-COOKIE-1", cookie)
    return struct.pack("!H", FAMILY_WILD) + b"".join(struct.pack("!H", len(part)) + part for part in fields)
