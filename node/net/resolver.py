"""The daemon's side of the resolver process (node/net/dns.py): starts it, keeps it running, hands it the boxes' DNS ports."""

from __future__ import annotations

import array
import json
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from node.net.dns import Counts

FIRST_DELAY, LAST_DELAY, STEADY = 0.1, 5.0, 60.0  # seconds before a restart; one that lived STEADY begins anew at the first

log = logging.getLogger(__name__)


class Resolver:
    """Made by open_resolver(). Holds every box's sockets, so a resolver process that died is replaced without a question lost in them."""

    def __init__(self, allow: Sequence[str], resolv_conf: Path) -> None:
        self.counts: dict[str, Counts] = {}
        """Of each box, at most a few seconds old; from zero when a box is added or the process restarted."""
        self.pid: int | None = None
        self._arguments = [str(resolv_conf), *allow]
        self._boxes: dict[str, tuple[socket.socket, socket.socket]] = {}
        self._control: trio.socket.SocketType | None = None

    async def add_box(self, box_id: str, sockets: tuple[socket.socket, socket.socket]) -> None:
        """The box's guest gets answers from now on. Takes both sockets over (BoxNetwork.dns_sockets()); an earlier pair is closed."""
        self._close(box_id)
        self._boxes[box_id] = sockets
        await self._tell({"add": box_id}, sockets)

    async def remove_box(self, box_id: str) -> None:
        """Safe to repeat. Its sockets are closed here at once, in the process a moment later."""
        self._close(box_id)
        self.counts.pop(box_id, None)
        await self._tell({"remove": box_id})

    def _close(self, box_id: str) -> None:
        for sock in self._boxes.pop(box_id, ()):
            sock.close()

    async def _tell(self, order: dict[str, str], sockets: tuple[socket.socket, ...] = ()) -> None:
        if self._control is None:
            return  # it will be told when it starts
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno() for sock in sockets]))] if sockets else []
        with suppress(OSError):  # just died: the next one is told everything
            await self._control.sendmsg([json.dumps(order).encode()], rights)

    async def keep_running(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        delay = FIRST_DELAY
        while True:
            began = trio.current_time()
            await self._run(task_status)
            task_status = trio.TASK_STATUS_IGNORED
            delay = FIRST_DELAY if trio.current_time() - began > STEADY else delay
            log.warning("the resolver process ended; starting another in %.1f s", delay)
            await trio.sleep(delay)
            delay = min(2 * delay, LAST_DELAY)

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with trio.socket.from_stdlib_socket(ours) as control:
            with theirs:
                command = [sys.executable, "-P", "-m", "node.net.dns", str(theirs.fileno()), *self._arguments]
                process = await trio.lowlevel.open_process(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            try:
                self._control, self.pid = control, process.pid
                for box_id, sockets in list(self._boxes.items()):
                    await self._tell({"add": box_id}, sockets)
                task_status.started()
                await self._read_counts(control)
            finally:
                self._control, self.pid, self.counts = None, None, {}
                process.kill()  # it holds nothing that could be lost
                with trio.CancelScope(shield=True):
                    await process.wait()

    async def _read_counts(self, control: trio.socket.SocketType) -> None:
        with suppress(ConnectionError):
            while report := await control.recv(1 << 20):
                self.counts = {box_id: Counts(*values) for box_id, values in json.loads(report).items() if box_id in self._boxes}

    def close(self) -> None:
        for box_id in list(self._boxes):
            self._close(box_id)


@asynccontextmanager
async def open_resolver(allow: Sequence[str] = (), resolv_conf: Path = Path("/etc/resolv.conf")) -> AsyncIterator[Resolver]:
    """The resolver process runs within. `allow`: networks behind the deny floor whose addresses boxes may be told all the same."""
    resolver = Resolver(allow, resolv_conf)
    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(resolver.keep_running)
            yield resolver
        finally:
            nursery.cancel_scope.cancel()
            resolver.close()
