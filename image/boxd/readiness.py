"""Waiting for what a server does when it can be used: it listens on a port, or says so in its log."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from .commands import Entry
from .output import CHUNK, Spool
from .protocol import Readiness

LOOK_EVERY = 0.2  # seconds
LISTEN = "0A"  # TCP_LISTEN of include/net/tcp_states.h, as /proc/net/tcp prints it


async def wait_ready(entry: Entry, wait: float, port: int | None, text: str | None) -> Readiness:
    """Returns when the port listens or the log holds the text, when the command has ended without, or after `wait` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait
    searches = [Search(spool, text.encode()) for spool in (entry.stdout, entry.stderr)] if text else []
    while True:
        ended = not entry.view.running  # looked at first: what it did before its end still counts
        if port and listens(port):
            return Readiness(True, f"port {port} listens", entry.with_output())
        if any(search.found() for search in searches):
            return Readiness(True, f"log has {text!r}", entry.with_output())
        if ended:
            return Readiness(False, _how(entry), entry.with_output())
        rest = deadline - loop.time()
        if rest <= 0:
            return Readiness(False, f"waited {wait:g} s", entry.with_output())
        await entry.wait_ended(min(LOOK_EVERY, rest))


class Search:
    """Looks for `text` in a growing stream, every byte once."""

    def __init__(self, spool: Spool, text: bytes) -> None:
        self._spool, self._text = spool, text
        self._offset, self._rest = 0, b""

    def found(self) -> bool:
        while True:
            start, data = self._spool.read(self._offset, CHUNK)
            if not data:
                return False
            window = self._rest + data if start == self._offset else data
            if self._text in window:
                return True
            self._offset = start + len(data)
            self._rest = window[len(window) - len(self._text) + 1 :] if len(self._text) > 1 else b""


def listens(port: int) -> bool:
    """Whether any process of the box listens on the TCP port, on any address of either family."""
    wanted = re.compile(rf":{port:04X} [0-9A-F]+:0000 {LISTEN} ")
    return any(path.exists() and wanted.search(path.read_text()) for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")))


def _how(entry: Entry) -> str:
    view = entry.view
    return f"exited with {view.exit_code}" if view.exit_code is not None else f"ended by {view.signal or view.end_reason}"
