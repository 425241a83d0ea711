"""A node in memory, as good as a real one to the coordinator: boxes with states, commands that end at once, and faults on demand.

Used by the coordinator's unit tests and by the bench (`coordinator_added_ms`: what a call costs where no guest runs).
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from coordinator.errors import NodeProblem
from coordinator.node_client import Action, Progress, unheard
from node.protocol import (
    BoxState,
    BoxView,
    Capacity,
    CommandView,
    CommandWait,
    GuestHealth,
    Hop,
    ImageView,
    NodeView,
    OutputView,
    Problem,
    RunCommand,
    StartBox,
    UnsavedWork,
    WaitCommand,
)

GIB = 1 << 30
Answer = tuple[int, bytes, bytes]  # exit code, stdout, stderr
AFTER = {"freeze": BoxState.FROZEN, "thaw": BoxState.READY, "archive": BoxState.ARCHIVED, "restore": BoxState.READY}


def problem(code: str, hop: Hop = Hop.NODE, message: str = "") -> NodeProblem:
    return NodeProblem(Problem(code=code, message=message or code.replace("_", " "), hop=hop))


@dataclass
class FakeNode:
    """`faults` holds, for an operation's name, errors to raise, one a call; `answer` says what a command prints; a box's start takes
    `start_takes` seconds and any other wait none."""

    id: str
    clock: Callable[[], float]
    flavours: tuple[str, ...] = ("core",)
    units: int = 8  # size units that fit
    accel: str = "kvm"
    development: bool = False
    start_takes: float = 0.0
    answer: Callable[[RunCommand], Answer] = lambda command: (0, b"", b"")
    faults: dict[str, list[Exception]] = field(default_factory=dict)
    boxes: dict[str, BoxView] = field(default_factory=dict)
    ran: dict[str, dict[str, CommandView]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)

    async def view(self) -> NodeView:
        return self.describe()

    def describe(self) -> NodeView:
        used = sum(box.size for box in self.boxes.values() if box.state in {BoxState.STARTING, BoxState.READY})
        capacity = Capacity(
            memory_total=self.units * GIB, memory_used=used * GIB, disk_total=100 * GIB, disk_free=90 * GIB, vcpus=self.units * 16,
            vcpus_used=used * 2, unit_memory=GIB, unit_vcpus=2, unit_work=GIB,
        )  # fmt: skip
        images = [ImageView(flavour=name, digest=f"sha256:{name}", built_at=0.0, bytes=GIB) for name in self.flavours]
        return NodeView.model_validate(
            {"id": self.id, "version": "0", "pid": 1, "ready": True, "accel": self.accel, "development": self.development}
            | {"capacity": capacity, "images": images, "boxes": list(self.boxes.values())}
        )

    async def box(self, box: str) -> BoxView:
        await self._asked("box")
        return self._known(box)

    async def start(self, box: str, spec: StartBox, progress: Progress = unheard) -> BoxView:
        await self._asked("start")
        if box not in self.boxes:
            if self.describe().capacity.memory_used + spec.size * GIB > self.units * GIB:
                raise problem("no_capacity")
            now = self.clock()
            self.boxes[box] = BoxView(
                id=box, name=spec.name, state=BoxState.STARTING, flavour=spec.flavour, size=spec.size, generation=1, created_at=now,
                last_used_at=now, state_since=now, image=f"sha256:{spec.flavour}", node=self.id,
            )  # fmt: skip
            progress("booting", 0.5)
            await trio.sleep(self.start_takes)
            health = GuestHealth(healthy=True, checked_at=now)
            self._set(box, state=BoxState.READY, guest=health, freezes_at=self.clock() + 600, archives_at=self.clock() + 86_400)
        return self._known(box)

    async def act(self, box: str, action: Action, progress: Progress = unheard) -> BoxView:
        await self._asked(action)
        return self._set(box, state=AFTER[action], deletes_at=self.clock() + 30 * 86_400 if action == "archive" else None)

    async def destroy(self, box: str, progress: Progress = unheard) -> BoxView:
        await self._asked("destroy")
        return self.boxes.pop(self._known(box).id).model_copy(update={"state": BoxState.STOPPED})

    async def unsaved(self, box: str) -> UnsavedWork:
        await self._asked("unsaved")
        self._known(box)
        return UnsavedWork(repositories=[{"path": "/work/app", "branch": "main", "uncommitted": 2, "unpushed": 0}])

    async def exec(self, box: str, command: RunCommand, progress: Progress = unheard) -> CommandView:
        await self._asked("exec")
        self._set(box, state=BoxState.READY)
        ran = self.ran.setdefault(box, {})
        if command.exec_id not in ran:
            code, out, err = self.answer(command)
            now, running = self.clock(), command.background
            ran[command.exec_id] = CommandView(
                exec_id=command.exec_id, cmd=command.cmd, cwd=command.cwd, user=command.user, background=running, pid=42, running=running,
                started_at=now, ended_at=None if running else now, exit_code=None if running else code, signal=None, timed_out=False,
                end_reason=None if running else "exited", cpu_seconds=0.0, stdout=_output(out), stderr=_output(err),
            )  # fmt: skip
        return ran[command.exec_id]

    async def commands(self, box: str) -> list[CommandView]:
        await self._asked("commands")
        self._known(box)
        return list(self.ran.get(box, {}).values())

    async def wait(self, box: str, exec_id: str, wait: WaitCommand, progress: Progress = unheard) -> CommandWait:
        await self._asked("wait")
        command = self._command(box, exec_id)
        return CommandWait(ready=not command.running, why="exited with 0" if not command.running else "waited", command=command)

    async def stop_command(self, box: str, exec_id: str) -> CommandView:
        await self._asked("stop_command")
        ended = {"running": False, "ended_at": self.clock(), "signal": "SIGTERM", "end_reason": "stopped"}
        self.ran[box][exec_id] = command = self._command(box, exec_id).model_copy(update=ended)
        return command

    @asynccontextmanager
    async def output(self, box: str, exec_id: str, stream: str, offset: int) -> AsyncIterator[AsyncIterator[bytes]]:
        command = self._command(box, exec_id)
        held = command.stdout if stream == "stdout" else command.stderr

        async def chunks() -> AsyncIterator[bytes]:
            yield base64.b64decode(held.text_b64 if held else "")[offset:]

        yield chunks()

    async def _asked(self, operation: str) -> None:
        self.asked[operation] += 1
        await trio.lowlevel.checkpoint()
        if self.faults.get(operation):
            raise self.faults[operation].pop(0)

    def _known(self, box: str) -> BoxView:
        if box not in self.boxes:
            raise problem("box_not_found")
        return self.boxes[box]

    def _command(self, box: str, exec_id: str) -> CommandView:
        if exec_id not in self.ran.get(box, {}):
            raise problem("command_not_found", Hop.GUEST)
        return self.ran[box][exec_id]

    def _set(self, box: str, **changes: object) -> BoxView:
        self.boxes[box] = self._known(box).model_copy(update={"state_since": self.clock(), **changes})
        return self.boxes[box]


def _output(data: bytes) -> OutputView:
    """The last 16 KB, as boxd keeps them."""
    tail = data[-16 * 1024 :]
    return OutputView(text_b64=base64.b64encode(tail).decode(), total=len(data), truncated=len(tail) < len(data), path="/run/boxd/x.out")
