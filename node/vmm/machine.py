"""One QEMU process as an owned thing.

    machine = await Machine.spawn(nursery, spec, files)     cold boot: the guest runs
    machine = await Machine.spawn(nursery, spec, replace(files, state=path))
    await machine.load(); await machine.cont()              start and thaw: loaded, stopped; then it runs
    await machine.freeze(path)                              stopped, saved, killed: no process and a whole `path`

The RAM is a file that QEMU maps shared (`x-ignore-shared`), so a saved state is about 100 KB whatever the guest's size. The nursery holds
the machine's tasks (monitor, exit, log sizes); cancelling it lets go of QEMU and does not end it: only `kill` and `freeze` do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from node.errors import VmError
from node.vmm.command import Descriptors, MachineSpec, qemu_argv
from node.vmm.process import KILL_DEADLINE, Process, tail
from node.vmm.qmp import Monitor, listen

SPAWN_DEADLINE = 20.0  # seconds from spawn to the monitor's greeting; 30 ms on an idle host
STATE_DEADLINE = 30.0  # seconds for saving or loading; 5 ms, and as long as the disks' caches take to be written
STRAY_DEADLINE = 2.0
LOG_LIMIT = 4 << 20  # bytes of console and of errors; a guest may write to its console for ever
LOG_PERIOD = 10.0


@dataclass(frozen=True)
class Files:
    """What one machine is made of. Paths are opened here and handed over as descriptors; `tap` is a descriptor already.

    `overlays` lie on `base` in this order; the last one is the box's own. `monitor` is where the unix socket is bound, in a 0700 folder.
    """

    ram: Path
    base: Path
    overlays: tuple[Path, ...]
    work: Path
    console: Path
    errors: Path
    monitor: Path
    tap: int | None = None
    state: Path | None = None  # load this one; else boot:
    kernel: Path | None = None
    initrd: Path | None = None
    token: bytes | None = None  # boxd's first bearer token, readable by the guest's root


class Machine:
    """`exited` is set once the process is gone; `process.exit_code` and `errors` then say how it ended."""

    def __init__(self, process: Process, monitor: Monitor, files: Files) -> None:
        self.process = process
        self.monitor = monitor
        self.exited = trio.Event()
        self._files = files

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        """The end of what QEMU wrote to its standard error."""
        return tail(self._files.errors)

    @classmethod
    async def spawn(cls, nursery: trio.Nursery, spec: MachineSpec, files: Files, *, name: str = "box") -> Machine:
        """Starts QEMU and reaches its monitor. Raises VmError with QEMU's own words; cancelled or failed, no process is left."""
        with opened(spec, files) as fds, errors_file(files.errors) as errors:
            process = await Process.spawn(qemu_argv(spec, fds, name), pass_fds=fds.all(), errors=errors)
        try:
            return await cls._reach(nursery, process, files)
        except BaseException as error:
            await _end(process)
            if isinstance(error, VmError):
                raise VmError("QEMU does not start", cause=tail(files.errors) or error.problem.cause) from error
            raise

    @classmethod
    async def adopt(cls, nursery: trio.Nursery, pid: int, started: int, files: Files) -> Machine:
        """The QEMU that an earlier daemon started. It runs on, or runs again if a freeze was cut short. VmError: it is gone."""
        process = Process.adopt(pid, started)
        machine = await cls._reach(nursery, process, files)
        if await machine.status() != "running":
            await machine.cont()
        return machine

    @classmethod
    async def _reach(cls, nursery: trio.Nursery, process: Process, files: Files) -> Machine:
        monitor = await Monitor.connect(nursery, files.monitor, SPAWN_DEADLINE)
        capabilities = [{"capability": capability, "state": True} for capability in ("x-ignore-shared", "events")]
        await monitor.execute("migrate-set-capabilities", capabilities=capabilities)
        machine = cls(process, monitor, files)
        nursery.start_soon(machine._watch)
        return machine

    async def load(self) -> None:
        """Loads the state given as `files.state`; the guest is then stopped, its RAM untouched. VmError if it does not fit: kill."""
        await self._migrate("migrate-incoming", uri="file:/dev/fdset/1")

    async def cont(self) -> None:
        await self.monitor.execute("cont")

    async def stop(self) -> None:
        """Stops the virtual CPUs; time stands still for the guest."""
        await self.monitor.execute("stop", deadline=STATE_DEADLINE)

    async def status(self) -> str:
        """QEMU's run state: running, paused, inmigrate, postmigrate, ..."""
        return str((await self.monitor.execute("query-status"))["status"])

    async def freeze(self, path: Path) -> None:
        """Stops the guest, saves its state to the new file `path`, ends QEMU. Not cut short by a cancel; bounded by STATE_DEADLINE.

        VmError: nothing is left at `path`, and the guest runs on (or has ended: see `exited`).
        """
        with trio.CancelScope(shield=True):
            await self.stop()
            try:
                await self._save(path)
            except (VmError, OSError) as error:
                with suppress(OSError):
                    path.unlink()
                with suppress(VmError):
                    await self.cont()
                raise VmError("the guest could not be saved and runs on", cause=_cause(error)) from error
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, and waits until the process is gone. Not cut short by a cancel. May be called again."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + KILL_DEADLINE):
            self.process.send_kill()
            await self.exited.wait()
            return
        cause, remedy = f"killed {KILL_DEADLINE:g} s ago", "Look for I/O errors in the host's kernel log."
        raise VmError(f"QEMU (pid {self.pid}) does not die", cause=cause, remedy=remedy)

    async def _save(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)  # a set matches by access mode: exactly O_WRONLY
        try:
            number = (await self.monitor.execute("add-fd", fd=fd))["fdset-id"]
        finally:
            os.close(fd)
        try:
            await self._migrate("migrate", uri=f"file:/dev/fdset/{number}")
        except VmError:
            with suppress(VmError):
                await self.monitor.execute("remove-fd", fdset_id=number)
            raise

    async def _migrate(self, command: str, uri: str) -> None:
        """Runs one migration to its end: `completed`, or VmError."""
        status = "no end of it"
        with self.monitor.events("MIGRATION") as events, trio.move_on_after(STATE_DEADLINE):
            await self.monitor.execute(command, uri=uri)
            async for event in events:
                status = event["data"]["status"]
                if status == "completed":
                    return
                if status in ("failed", "cancelled"):
                    break
        raise VmError(f"QEMU's {command} ended with: {status}", cause=self.errors or self.monitor.cause)

    async def _watch(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._bound_logs)
                await self.process.wait()
                nursery.cancel_scope.cancel()
            self.exited.set()
        finally:
            self.monitor.close()

    async def _bound_logs(self) -> None:
        while True:
            await trio.sleep(LOG_PERIOD)
            for path in (self._files.console, self._files.errors):
                with suppress(OSError):
                    bound(path)


def bound(path: Path, limit: int = LOG_LIMIT) -> None:
    """Cuts a log that is appended to back to its last quarter once it is longer than `limit`; what is written meanwhile may be lost."""
    with path.open("r+b") as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            file.seek(size - limit // 4)
            kept = file.read(limit // 4)
            file.truncate(0)
            os.pwrite(file.fileno(), kept, 0)


async def end_stray(path: Path) -> None:
    """Ends the QEMU that listens at the monitor socket `path`, if there is one: its start or thaw was cut short."""
    async with trio.open_nursery() as nursery:
        with suppress(VmError):
            monitor = await Monitor.connect(nursery, path, STRAY_DEADLINE)
            await monitor.execute("quit", deadline=STRAY_DEADLINE)
        nursery.cancel_scope.cancel()


@contextmanager
def errors_file(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened(spec: MachineSpec, files: Files) -> Iterator[Descriptors]:
    """Everything of `files` open, with no more rights than QEMU needs; all but the tap is closed again here, QEMU has its own copies."""
    with ExitStack() as stack:

        def take(path: Path, flags: int, mode: int = 0o600) -> int:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            stack.callback(os.close, fd)
            return fd

        try:
            *lower, top = files.overlays
            token = None
            if files.token is not None:
                token = os.memfd_create("token", os.MFD_CLOEXEC)
                stack.callback(os.close, token)
                os.write(token, files.token)
            yield Descriptors(
                monitor=stack.enter_context(listen(files.monitor)).fileno(),
                ram=take(files.ram, os.O_RDWR),
                base=take(files.base, os.O_RDONLY),
                overlays=(*(take(path, os.O_RDONLY) for path in lower), take(top, os.O_RDWR)),
                work=take(files.work, os.O_RDWR),
                console=take(files.console, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
                tap=files.tap,
                state=None if files.state is None else take(files.state, os.O_RDONLY),
                kernel=None if files.kernel is None else take(files.kernel, os.O_RDONLY),
                initrd=None if files.initrd is None else take(files.initrd, os.O_RDONLY),
                token=token,
                kvm=take(Path("/dev/kvm"), os.O_RDWR) if spec.accel == "kvm" else None,
            )
        except OSError as error:
            raise VmError(f"{Path(str(error.filename)).name} cannot be opened for QEMU", cause=str(error)) from error


def _cause(error: VmError | OSError) -> str:
    return f"{error}: {error.problem.cause}" if isinstance(error, VmError) else str(error)


async def _end(process: Process) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + KILL_DEADLINE):
        process.send_kill()
        await process.wait()
