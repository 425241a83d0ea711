"""One box: its record, its lock, and what it owns while it runs.

Changes of state take the lock, so operations on one box are serialised (report 22). Calls into the guest hold the box awake without taking
the lock: any number of them run at once, and the clocks wait for them. What happens to the microVM itself is in node/microvm.py.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Generic

import trio

from node.config import Clocks
from node.errors import BoxConflict, GuestError, NodeError
from node.guest import AttachedCommand, Guest
from node.journal import BoxRecord, Journal
from node.lifecycle import Action, Use, action_now, next_due
from node.operations import Report
from node.protocol import (
    AttachBox,
    BoxState,
    BoxView,
    CommandView,
    CommandWait,
    GuestHealth,
    Problem,
    RunCommand,
    UnsavedWork,
    WaitCommand,
)
from node.unsaved import look_for_unsaved_work
from node.vms import MicroVms, R

POLL = 20.0  # seconds that one request to boxd may wait: longer waits are made of these
HEALTH_WITHIN = 5.0
FLUSH_AFTER = 2.0  # seconds after a freeze: a box that is woken at once need not share the disk with its own flush
COMMANDS_WITHIN = 5.0


def quiet(message: str, fraction: float | None = None) -> None:
    """A report that nobody reads."""


class Box(Generic[R]):
    """`spawn` starts the task that watches a running VM; `admit` raises NoCapacity when the box's memory does not fit any more."""

    def __init__(
        self,
        record: BoxRecord,
        *,
        vms: MicroVms[R],
        journal: Journal,
        clocks: Clocks,
        admit: Callable[[Box[R]], None],
        spawn: Callable[..., None],
        log: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.record = record
        self._vms, self._journal, self._clocks = vms, journal, clocks
        self._admit, self._spawn, self._log, self._now = admit, spawn, log, now
        self._lock = trio.Lock()
        self._running: R | None = None
        self._rising = False  # on its way to running
        self._holds = 0
        self._running_commands = 0
        self._last_command_end = 0.0
        self._health: GuestHealth | None = None
        self._traffic = (0, 0)  # (sent, received) of the network that is there now

    # ---- what it is

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def state(self) -> BoxState:
        return self.record.state

    @property
    def uses_memory(self) -> bool:
        """Running, or on its way to it."""
        return self._running is not None or self._rising

    def view(self, node: str = "") -> BoxView:
        record, use = self.record, self._use()
        due = next_due(record.state, record.state_since, use, self._clocks)
        if self._running:
            self._traffic = self._running.counters()
        return BoxView(
            id=record.id,
            name=record.name,
            state=record.state,
            flavour=record.flavour,
            size=record.size,
            generation=record.generation,
            created_at=record.created_at,
            last_used_at=record.last_call_at,
            state_since=record.state_since,
            image=record.image,
            node=node,
            freezes_at=due.at if due and due.action == "freeze" else None,
            archives_at=due.at if due and due.action == "archive" else None,
            deletes_at=due.at if due and due.action == "delete" else None,
            running_commands=self._running_commands,
            cold=record.cold,
            problem=Problem(**record.problem) if record.problem else None,
            guest=self._health if self._running else None,
            sent_bytes=record.sent_bytes + self._traffic[0],
            received_bytes=record.received_bytes + self._traffic[1],
            pid=self._running.pid if self._running else None,
        )

    def console(self) -> bytes:
        return self._vms.console(self.record)

    async def look(self) -> None:
        """Refreshes what is known of the guest's health and commands; a guest that does not answer is told as unhealthy, never an error."""
        if self._running is None:
            return
        guest = self._running.guest
        with trio.move_on_after(HEALTH_WITHIN):
            try:
                self._health = await guest.health()
                self._counted(await guest.commands())
                return
            except GuestError:
                pass
        self._health = GuestHealth(healthy=False, checked_at=self._now())

    # ---- changes of state, one at a time

    async def start(self, report: Report) -> None:
        """From the template until boxd confirms. A start that fails leaves nothing behind but the error."""
        async with self._lock:
            self._journal.write(self.record)
            try:
                with self._on_its_way():
                    await self._run(await self._vms.start(self.record, report))
            except BaseException:
                with trio.CancelScope(shield=True):
                    await self._vms.destroy(self.record)
                    self._journal.remove(self.id)
                raise

    async def freeze(self, *, only_if_due: bool = False) -> None:
        """Milliseconds; afterwards no process is left. Final before it returns; a freeze that fails lets the box go on."""
        async with self._lock:
            if self.state is BoxState.FROZEN:
                return
            running = self._must_run("freeze")
            if only_if_due and self.due(self._now()) != "freeze":
                return
            self._traffic = running.counters()
            self._running = None  # so that its end is no surprise
            try:
                record = await self._vms.freeze(self.record, running)
            except BaseException:
                self._running = running
                raise
            self._settle(replace(record, pid=None), BoxState.FROZEN)
        self._spawn(self._make_durable_soon, self.record.generation)

    async def make_durable(self) -> None:
        """A frozen box survives a crash of the host from now on. Takes as long as the disk needs for its memory, without the lock: a thaw
        never waits for it. A failure is logged; the snapshot is then good for this boot of the host only."""
        generation = self.record.generation
        try:
            if self.state is BoxState.FROZEN:
                await self._vms.flush(self.record)
            async with self._lock:
                if self.state is BoxState.FROZEN and self.record.generation == generation:
                    await self._vms.mark_durable(self.record)
                    await trio.to_thread.run_sync(lambda: self._journal.write(self.record, durable=True))
        except (NodeError, OSError) as error:
            self._log(f"box {self.id}: its snapshot is not durable: {error}")

    async def thaw(self, report: Report = quiet) -> None:
        """From frozen in milliseconds, from the archive by a cold boot; a box that runs is left as it is. Counts as use."""
        async with self._lock:
            await self._wake(report)

    async def archive(self) -> None:
        """Only the disks stay. A frozen guest is thawed once more to write its memory's dirty pages to them."""
        async with self._lock:
            if self.state is BoxState.ARCHIVED:
                return
            if self.state is BoxState.FROZEN:
                await self._wake(quiet)
            running = self._must_run("archive")
            try:
                await running.guest.settle()
            except GuestError as error:
                self._log(f"box {self.id}: archived without a last sync: {error}")
            self._count(running)
            self._running = None
            await self._vms.end(running)
            await self._vms.drop_memory(self.record)
            self._settle(replace(self.record, pid=None), BoxState.ARCHIVED)

    async def destroy(self) -> None:
        """The box and all it had are gone; its record too, once its files are (report 50)."""
        async with self._lock:
            running, self._running = self._running, None
            if running:
                await self._vms.end(running)
            await self._vms.destroy(self.record)
            self._journal.remove(self.id)
            self.record = replace(self.record, state=BoxState.STOPPED, state_since=self._now(), pid=None)

    async def adopt(self, running: R) -> None:
        """Takes back a microVM that outlived the daemon before."""
        async with self._lock:
            await self._run((self.record, running))

    def forget_vm(self, problem: NodeError) -> None:
        """The VM is gone without a freeze: only the disks are left, and that is said."""
        self._running = None
        self._health = None
        record = replace(self.record, pid=None, cold=True, problem=problem.problem.model_dump())
        self._settle(record, BoxState.ARCHIVED)

    # ---- use

    @asynccontextmanager
    async def awake(self, report: Report = quiet) -> AsyncIterator[Guest]:
        """The guest, woken if need be, and kept awake for as long as the block runs. Counts as use.

        Errors: BoxConflict when the box is gone, NoCapacity when there is no memory to wake it, GuestError from the guest.
        """
        async with self._lock:
            running = await self._wake(report)
            self._holds += 1
        try:
            yield running.guest
        except GuestError as error:
            if self._running is running:
                raise
            raise BoxConflict(
                f"box {self.id} was frozen or stopped during the call",
                cause=str(error),
                remedy="What ran goes on after the next wake: ask for its result by execId.",
            ) from error
        finally:
            self._holds -= 1

    async def run(self, request: RunCommand, report: Report = quiet) -> CommandView:
        """Starts the command and waits until it has ended or `wait_sec` passed. The same execId again waits for the same command."""
        async with self.awake(report) as guest:
            view = await guest.run(request, wait=0.0 if request.background else min(request.wait_sec, POLL))
            if view.cmd != request.cmd:
                raise BoxConflict(
                    f"execId {request.exec_id} is taken by another command of this box",
                    code="exec_id_taken",
                    cause=f"it ran: {view.cmd[:200]}",
                    remedy="Choose a new execId for a new command; the same one asks again for the command it belongs to.",
                )
            if request.background:
                self._running_commands += 1
                return view
            return await self._until_ended(guest, view, request.wait_sec - POLL)

    async def wait(self, exec_id: str, request: WaitCommand) -> CommandWait:
        """Waits until the command has ended, or is ready by port or log, or `wait_sec` passed."""
        async with self.awake() as guest:
            if request.until == "ready":
                return await guest.ready(exec_id, request)
            view = await guest.command(exec_id, wait=min(request.wait_sec, POLL))
            view = await self._until_ended(guest, view, request.wait_sec - POLL)
            why = f"waited {request.wait_sec:g} s" if view.running else f"ended: {view.end_reason}"
            return CommandWait(ready=not view.running, why=why, command=view)

    async def commands(self) -> list[CommandView]:
        async with self.awake() as guest:
            return self._counted(await guest.commands())

    async def stop_command(self, exec_id: str) -> CommandView:
        async with self.awake() as guest:
            return await guest.stop(exec_id)

    async def unsaved(self) -> UnsavedWork:
        async with self.awake() as guest:
            return await look_for_unsaved_work(guest)

    async def output(self, exec_id: str, name: str, *, offset: int, follow: bool) -> AsyncIterator[bytes]:
        """The bytes of a stream; close the generator to stop."""
        async with self.awake() as guest, aclosing(guest.output(exec_id, name, offset=offset, follow=follow)) as chunks:
            async for chunk in chunks:
                yield chunk

    @asynccontextmanager
    async def attach(self, spec: AttachBox) -> AsyncIterator[AttachedCommand]:
        async with self.awake() as guest, guest.attach(spec) as stream:
            yield stream

    # ---- clocks

    def due(self, now: float) -> Action | None:
        """The clock whose time has come, as far as is known without asking the guest."""
        return action_now(self.state, self.record.state_since, self._use(), self._clocks, now)

    async def due_for_sure(self) -> Action | None:
        """The same after asking the guest what runs in it. A guest that does not answer counts as idle: it is frozen as it is."""
        if self.due(self._now()) == "freeze" and self._running:
            with trio.move_on_after(COMMANDS_WITHIN):
                try:
                    self._counted(await self._running.guest.commands())
                except GuestError as error:
                    self._log(f"box {self.id}: {error}")
        return self.due(self._now())

    # ---- inside

    async def _wake(self, report: Report) -> R:
        """With the lock held: a running VM, by whichever way leads there."""
        if self._running is None:
            self._admit(self)
        with self._on_its_way():
            if self.state is BoxState.FROZEN:
                try:
                    await self._run(await self._vms.thaw(self.record))
                except NodeError as error:
                    self._log(f"box {self.id}: the thaw failed, next is a cold boot: {error} {error.problem.cause}")
                    self.forget_vm(error)
            if self.state is BoxState.ARCHIVED:
                report("booting the box from its disk", None)
                await self._run(await self._vms.boot(self.record, report))
        running = self._must_run("use")
        self.record = replace(self.record, last_call_at=self._now())
        return running

    async def _run(self, started: tuple[BoxRecord, R]) -> None:
        record, running = started
        self._running = running
        now = self._now()
        record = replace(record, pid=running.pid, pid_started=running.pid_started, last_call_at=now, problem=None)
        self._settle(record, BoxState.READY)
        self._spawn(self._watch, running)

    async def _watch(self, running: R) -> None:
        """A guest that powers off, or a QEMU that dies, leaves a box that can be booted again."""
        await running.wait_exit()
        if self._running is running:
            self._log(f"box {self.id}: its VM ended")
            self.forget_vm(BoxConflict("the VM ended by itself: the guest powered off, or QEMU died", code="vm_ended"))
            await self._vms.end(running)

    async def _make_durable_soon(self, generation: int) -> None:
        await trio.sleep(FLUSH_AFTER)
        if self.record.generation == generation:
            await self.make_durable()

    @contextmanager
    def _on_its_way(self) -> Iterator[None]:
        self._rising = True
        try:
            yield
        finally:
            self._rising = False

    async def _until_ended(self, guest: Guest, view: CommandView, left: float) -> CommandView:
        deadline = trio.current_time() + left
        while view.running and (remaining := deadline - trio.current_time()) > 0:
            view = await guest.command(view.exec_id, wait=min(remaining, POLL))
        if not view.running:
            self._last_command_end = self._now()
        return view

    def _counted(self, commands: list[CommandView]) -> list[CommandView]:
        self._running_commands = sum(command.running for command in commands)
        self._last_command_end = max((command.ended_at or 0.0 for command in commands), default=0.0)
        return commands

    def _count(self, running: R) -> None:
        """Keeps the bytes of a network that is about to go."""
        sent, received = running.counters()
        self._traffic = (0, 0)
        self.record = replace(self.record, sent_bytes=self.record.sent_bytes + sent, received_bytes=self.record.received_bytes + received)

    def _must_run(self, what: str) -> R:
        if self._running is None:
            raise BoxConflict(f"cannot {what} box {self.id}: it is {self.state}")
        return self._running

    def _settle(self, record: BoxRecord, state: BoxState) -> None:
        self.record = replace(record, state=state, state_since=self._now())
        self._journal.write(self.record)

    def _use(self) -> Use:
        return Use(
            last_call_at=self.record.last_call_at,
            last_url_at=self.record.last_url_at,
            commands_running=self._running_commands > 0,
            last_command_end=self._last_command_end,
            held=self._holds > 0,
        )

