"""boxd's HTTP interface: a table of routes, and what each one does with the parts behind it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from .attach import attach
from .commands import Commands, Entry
from .desktop import Desktop
from .health import DOCKER_SOCKET, docker_state, read_health
from .http1 import Answer, Json, Refused, Request, Server, Stream, Upgrade
from .identity import Identity, System
from .processes import Account, Process, Processes, environment
from .protocol import EXEC_ID, AttachSpec, CommandSpec, Restore
from .readiness import wait_ready
from .wire import from_wire, to_wire

LONGEST_WAIT = 3600.0
FOLLOW_QUIET = 20.0  # seconds without output after which a followed stream ends; the client asks on from where it is
BOOT_DEADLINE = 300.0
WARM_AFTER = 1.0
SYSTEMD = Path("/run/systemd/system")  # sd_booted(3)


@dataclass(frozen=True)
class Stop:
    grace_sec: float = 5.0


@dataclass(frozen=True)
class Settle:
    drop_caches: bool = False


class Boxd:
    """The daemon. Made inside the running loop; `run` serves until cancelled."""

    def __init__(self, *, state: Path, authority: Path, first_token: str, system: System, desktop: bool = True) -> None:
        self._system = system
        self._systemd = SYSTEMD.exists()
        self._processes = Processes()
        self._desktop = Desktop(self._processes, authority)
        self._with_desktop = desktop
        self._commands = Commands(state, self._processes, self._desktop.variables)
        memory = authority.with_name("identity")  # beside it in /run: kept by a freeze, gone with a boot
        self._identity = Identity(first_token, system, self._desktop.set_cookie, self._started, memory=memory)
        self._booted = self._warming = False

    async def run(self, host: str, port: int, listening: Callable[[tuple[str, int]], None]) -> None:
        async with asyncio.TaskGroup() as group:
            listening(await Server(self.answer).listen(host, port))
            group.create_task(self._identity.keep_clock())
            group.create_task(self._boot())
            if self._with_desktop:
                group.create_task(self._desktop.run())

    async def answer(self, request: Request) -> Answer:
        known_path = False
        for method, pattern, act in ROUTES:
            if found := pattern.fullmatch(request.path):
                known_path = True
                if method == request.method:
                    if act is not Boxd.restore:  # which has rules of its own
                        self._identity.check(request)
                    return await act(self, request, *found.groups())
        if known_path:
            raise Refused(405, "method_not_allowed", "That path has other methods.")
        raise Refused(404, "not_found", "There is no such path.")

    async def health(self, request: Request) -> Answer:
        ready = self._booted and self._system.network_up() and (self._desktop.settled or not self._with_desktop)
        generation, desktop = self._identity.generation, self._desktop.state
        return Json(to_wire(read_health(ready=ready, generation=generation, desktop=desktop, warming=self._warming)))

    async def restore(self, request: Request) -> Answer:
        return Json(to_wire(self._identity.restore(request, from_wire(Restore, request.body))))

    async def settle(self, request: Request) -> Answer:
        wanted = from_wire(Settle, request.body)
        await asyncio.to_thread(self._system.settle, drop_caches=wanted.drop_caches)
        return Json({})

    async def run_command(self, request: Request) -> Answer:
        entry = self._commands.start(from_wire(CommandSpec, request.body))
        return await self._when_ended(entry, request)

    async def list_commands(self, request: Request) -> Answer:
        return Json({"commands": to_wire(self._commands.all())})

    async def show_command(self, request: Request, exec_id: str) -> Answer:
        return await self._when_ended(self._commands.get(exec_id), request)

    async def wait_ready(self, request: Request, exec_id: str) -> Answer:
        port, text = request.query.get("port"), request.query.get("log")
        if not port and not text:
            raise Refused(400, "bad_request", "port or log must be given.")
        if port and not (re.fullmatch(r"\d{1,5}", port, re.ASCII) and 0 < int(port) < 65536):
            raise Refused(400, "bad_request", "port must be 1 to 65535.")
        entry = self._commands.get(exec_id)
        return Json(to_wire(await wait_ready(entry, _seconds(request), int(port) if port else None, text)))

    async def stop_command(self, request: Request, exec_id: str) -> Answer:
        return Json(to_wire(await self._commands.stop(exec_id, from_wire(Stop, request.body or b"{}").grace_sec)))

    async def output(self, request: Request, exec_id: str, stream: str) -> Answer:
        """Answers with one row of bytes without a gap. `Boxd-Offset` says where it begins, `Boxd-Running` whether more may come."""
        entry = self._commands.get(exec_id)
        offset = request.query.get("offset", "0")
        if not re.fullmatch(r"\d{1,15}", offset, re.ASCII):
            raise Refused(400, "bad_request", "offset must be a number.")
        start, _ = entry.spool(stream).read(int(offset), 1)
        chunks = self._pour(entry, stream, start, follow=request.query.get("follow") == "1")
        return Stream(chunks, {"Boxd-Offset": str(start), "Boxd-Running": str(int(entry.view.running))})

    async def attach(self, request: Request) -> Answer:
        if request.headers.get("upgrade") != "boxd-attach":
            raise Refused(426, "upgrade_required", "Attach needs `Upgrade: boxd-attach`.")
        upgrade: Upgrade = attach(from_wire(AttachSpec, request.body), self._processes, self._desktop.variables)
        return upgrade

    async def _when_ended(self, entry: Entry, request: Request) -> Answer:
        if entry.view.running and (wait := _seconds(request)):
            await entry.wait_ended(wait)
        return Json(to_wire(self._commands.show(entry.view.exec_id)))

    @staticmethod
    async def _pour(entry: Entry, stream: str, offset: int, *, follow: bool) -> AsyncGenerator[bytes, None]:
        spool = entry.spool(stream)
        while True:
            running, growth = entry.view.running, spool.growth  # looked at first: what came before is read below
            start, data = spool.read(offset)
            if start != offset:
                return
            if data:
                offset += len(data)
                yield data
            elif follow and running:
                try:
                    async with asyncio.timeout(FOLLOW_QUIET):
                        await growth.wait()
                except TimeoutError:
                    return
            else:
                return

    async def _boot(self) -> None:
        """Notes when systemd has finished booting: a template must not be frozen before."""
        if self._systemd:
            process = self._start_tool("systemctl", "is-system-running", "--wait")
            await asyncio.wait({process.exited}, timeout=BOOT_DEADLINE)
        self._booted = True

    def _started(self) -> None:
        """After a start, and after the box's first answers: what costs seconds of CPU under emulation and nobody waits for."""
        asyncio.get_running_loop().call_later(WARM_AFTER, self._warm_up)

    def _warm_up(self) -> None:
        """The journal moves to the new machine-id, and Docker starts."""
        if self._systemd:
            self._start_tool("systemctl", "--no-block", "restart", "systemd-journald")
            if DOCKER_SOCKET.exists() and docker_state(warming=False) == "down":
                self._warming = True
                self._start_tool("systemctl", "--no-block", "start", "docker")

    def _start_tool(self, *argv: str) -> Process:
        root = Account.named("root")
        return self._processes.spawn(argv, account=root, env=environment(root, {}, {}))


def _seconds(request: Request) -> float:
    text = request.query.get("waitSec", "0")
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text, re.ASCII):
        raise Refused(400, "bad_request", "waitSec must be a number of seconds.")
    return min(float(text), LONGEST_WAIT)


_COMMAND = f"/v1/commands/({EXEC_ID})"
ROUTES: tuple[tuple[str, re.Pattern[str], Callable[..., Awaitable[Answer]]], ...] = tuple(
    (method, re.compile(path), act)
    for method, path, act in (
        ("GET", "/v1/health", Boxd.health),
        ("POST", "/v1/restore", Boxd.restore),
        ("POST", "/v1/settle", Boxd.settle),
        ("POST", "/v1/commands", Boxd.run_command),
        ("GET", "/v1/commands", Boxd.list_commands),
        ("GET", _COMMAND, Boxd.show_command),
        ("GET", f"{_COMMAND}/ready", Boxd.wait_ready),
        ("POST", f"{_COMMAND}/stop", Boxd.stop_command),
        ("GET", f"{_COMMAND}/output/(stdout|stderr)", Boxd.output),
        ("POST", "/v1/attach", Boxd.attach),
    )
)
