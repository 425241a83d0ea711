"""The commands of the box: started once per execId, followed to their end, remembered on disk.

The table lives in memory, so it survives a freeze as it is (report 9); a small record per command lets it survive boxd's own end.
A command ends when its shell ends: what it left running in the background goes on, and its output is still kept (report 4).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .http1 import Refused
from .output import Budget, Pump, Spool, drained
from .processes import TAG, Account, Exit, Process, Processes, cpu_by_session, end_session, environment, session_carries, signal_name
from .protocol import EXEC_ID, FOREGROUND_LIMIT, OUTPUT_TAIL, Command, CommandSpec, Output

RUNNING_LIMIT = 256
KNOWN_LIMIT = 500
LISTED_CMD = 500  # characters
TIMEOUT_GRACE = 1.0  # seconds between SIGTERM and SIGKILL of a command that ran out of time
LONGEST_GRACE = 60.0


@dataclass
class Entry:
    """A command as it stands. `view` has no output; the spools have it."""

    view: Command
    stdout: Spool
    stderr: Spool
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str | None = None  # why boxd itself ended it

    def spool(self, stream: str) -> Spool:
        return {"stdout": self.stdout, "stderr": self.stderr}[stream]

    async def wait_ended(self, timeout: float) -> None:
        """Returns when the command has ended, or after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.ended.wait()

    def with_output(self) -> Command:
        return replace(self.view, stdout=_output(self.stdout), stderr=_output(self.stderr))


class Commands:
    def __init__(self, state: Path, processes: Processes, display: Mapping[str, str]) -> None:
        self._processes, self._display = processes, display
        self._records, self._output = state / "commands", state / "output"
        self._entries: dict[str, Entry] = {}  # in the order of their start
        self._budget = Budget(make_room=self._drop_oldest_output)
        self._tasks: set[asyncio.Task[None]] = set()
        for folder in (self._records, self._output):
            folder.mkdir(parents=True, exist_ok=True)
        self._recover()

    @property
    def running(self) -> int:
        return sum(entry.view.running for entry in self._entries.values())

    def get(self, exec_id: str) -> Entry:
        try:
            return self._entries[exec_id]
        except KeyError:
            raise Refused(404, "command_not_found", f"No command {exec_id[:64]!r} is known.", remedy="List the commands.") from None

    def all(self) -> list[Command]:
        """Without output, and of each `cmd` its beginning: the node takes 4 MB at most."""
        cpu = cpu_by_session() if self.running else {}
        return [_measured(replace(entry.view, cmd=entry.view.cmd[:LISTED_CMD]), cpu) for entry in self._entries.values()]

    def show(self, exec_id: str) -> Command:
        command = self.get(exec_id).with_output()
        return _measured(command, cpu_by_session()) if command.running else command

    def start(self, spec: CommandSpec) -> Entry:
        """Starts the command, or finds it when its execId is known. Raises Refused for a bad spec or when too many run."""
        if not re.fullmatch(EXEC_ID, spec.exec_id):
            raise Refused(400, "bad_request", "execId must match " + EXEC_ID)
        if known := self._entries.get(spec.exec_id):
            return known
        check_startable(spec.cmd, spec.cwd, spec.env)
        account = Account.named(spec.user)
        if self.running >= RUNNING_LIMIT:
            raise Refused(429, "too_many_commands", f"{RUNNING_LIMIT} commands are running.", remedy="Stop one, or wait for one to end.")
        self._forget_old()
        view = Command(
            exec_id=spec.exec_id, cmd=spec.cmd, cwd=spec.cwd, user=spec.user, background=spec.background, pid=None, running=True,
            started_at=time.time(), ended_at=None, exit_code=None, signal=None, timed_out=False, end_reason=None, cpu_seconds=0.0,
        )  # fmt: skip
        entry = Entry(view, *self._spools(spec.exec_id))
        self._entries[spec.exec_id] = entry
        entry.stdout.open()
        entry.stderr.open()
        env = environment(account, self._display, spec.env) | {TAG: spec.exec_id}
        oom_kills = guest_oom_kills()
        try:
            process, pumps = self._spawn(entry, account, env)
        except OSError as error:
            entry.stderr.write(f"boxd: could not start /bin/bash in {spec.cwd} as {spec.user}: {error}\n".encode())
            entry.stdout.close()
            entry.stderr.close()
            self._finish(entry, "start_failed")
            return entry
        entry.view = replace(view, pid=process.pid)
        self._record(entry)
        self._keep(self._follow(entry, process, pumps, _limit(spec), oom_kills))
        return entry

    async def stop(self, exec_id: str, grace: float) -> Command:
        """Ends the process group, also what an ended command left behind in it; returns the command as it then stands."""
        entry = self.get(exec_id)
        pid = entry.view.pid
        if pid and (entry.view.running or session_carries(pid, exec_id)):
            entry.reason = entry.reason or "stopped"
            await asyncio.shield(self._keep(end_session(pid, min(max(grace, 0.0), LONGEST_GRACE))))
            await entry.wait_ended(5)
        return self.show(exec_id)

    def _spawn(self, entry: Entry, account: Account, env: Mapping[str, str]) -> tuple[Process, list[Pump]]:
        """Raises OSError, and leaves no pipe behind then."""
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            view = entry.view
            process = self._processes.shell(view.cmd, account=account, env=env, cwd=view.cwd, stdout=out_write, stderr=err_write)
        except OSError:
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            os.close(out_write)
            os.close(err_write)
        return process, [Pump(out_read, entry.stdout), Pump(err_read, entry.stderr)]

    async def _follow(self, entry: Entry, process: Process, pumps: list[Pump], limit: float | None, oom_kills: int) -> None:
        done, _ = await asyncio.wait({process.exited}, timeout=limit)
        if not done:
            entry.reason = entry.reason or "timed_out"
            await end_session(process.pid, TIMEOUT_GRACE)
        end = await process.wait()
        await drained(pumps)
        reason = entry.reason or end_reason(end, oom_killed=guest_oom_kills() > oom_kills)
        self._finish(entry, reason, exit_code=end.code, by_signal=signal_name(end.signal), cpu_seconds=end.cpu_seconds)

    def _finish(
        self, entry: Entry, reason: str, *, exit_code: int | None = None, by_signal: str | None = None, cpu_seconds: float = 0.0
    ) -> None:
        entry.view = replace(
            entry.view, running=False, ended_at=time.time(), exit_code=exit_code, signal=by_signal,
            timed_out=reason == "timed_out", end_reason=reason, cpu_seconds=round(cpu_seconds, 3),
        )  # fmt: skip
        self._record(entry)
        entry.ended.set()
        for spool in (entry.stdout, entry.stderr):
            spool.wake()

    def _record(self, entry: Entry) -> None:
        path = self._records / f"{entry.view.exec_id}.json"
        record = {"command": asdict(entry.view), "totals": [entry.stdout.total, entry.stderr.total]}
        with contextlib.suppress(OSError):  # a full disk must not end the command; the table in memory stands
            draft = path.with_suffix(".new")
            draft.write_text(json.dumps(record))
            draft.replace(path)

    def _recover(self) -> None:
        found: list[tuple[Entry, list[int]]] = []
        for path in self._records.glob("*.json"):
            try:
                record = json.loads(path.read_text())
                view = Command(**record["command"])
                found.append((Entry(view, *self._spools(view.exec_id)), record["totals"]))
            except (OSError, ValueError, TypeError, KeyError):
                path.unlink(missing_ok=True)  # torn by a full disk
        for entry, (out, err) in sorted(found, key=lambda pair: pair[0].view.started_at):
            entry.stdout.recover(out)
            entry.stderr.recover(err)
            self._entries[entry.view.exec_id] = entry
            entry.ended.set()
            if entry.view.running:
                self._finish(entry, "boxd_restarted")

    def _spools(self, exec_id: str) -> tuple[Spool, Spool]:
        return Spool(self._output / f"{exec_id}.out", self._budget), Spool(self._output / f"{exec_id}.err", self._budget)

    def _forget_old(self) -> None:
        ended = [entry for entry in self._entries.values() if not entry.view.running]
        for entry in ended[: max(0, len(self._entries) - KNOWN_LIMIT + 1)]:
            entry.stdout.discard()
            entry.stderr.discard()
            (self._records / f"{entry.view.exec_id}.json").unlink(missing_ok=True)
            del self._entries[entry.view.exec_id]

    def _drop_oldest_output(self) -> bool:
        for entry in self._entries.values():
            if not entry.view.running and entry.stdout.kept + entry.stderr.kept:
                entry.stdout.discard()
                entry.stderr.discard()
                return True
        return False

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of the table's own: whoever asked for it may go away."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def check_startable(cmd: str, cwd: str, env: Mapping[str, str]) -> None:
    """Raises Refused for what execve or chdir would stumble over, naming the field."""
    if not cmd or "\0" in cmd:
        raise Refused(400, "bad_request", "cmd must not be empty or hold NUL bytes.")
    if any(not name or "=" in name or "\0" in name + value for name, value in env.items()):
        raise Refused(400, "bad_request", "env needs names without '=', and no NUL bytes.")
    if "\0" in cwd or not os.path.isdir(cwd):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        raise Refused(400, "cwd_not_found", f"The folder {cwd[:256]!r} does not exist in the box.", remedy="Make it, or name another.")


def end_reason(end: Exit, *, oom_killed: bool) -> str:
    """Why a command ended that boxd did not end. `oom_killed`: the kernel killed for want of memory meanwhile (report 12)."""
    killed = end.signal == signal.SIGKILL or end.code == 128 + signal.SIGKILL  # itself, or a child whose end bash passes on
    if killed and oom_killed:
        return "guest_oom"
    return "signal" if end.signal else "exited"


def guest_oom_kills() -> int:
    """How often the guest's kernel has killed for want of memory."""
    found = re.search(rb"^oom_kill (\d+)$", Path("/proc/vmstat").read_bytes(), re.MULTILINE)
    return int(found[1]) if found else 0


def _limit(spec: CommandSpec) -> float | None:
    if spec.background:
        return spec.timeout_sec
    return min(spec.timeout_sec or FOREGROUND_LIMIT, FOREGROUND_LIMIT)


def _measured(command: Command, cpu: Mapping[int, float]) -> Command:
    return replace(command, cpu_seconds=round(cpu.get(command.pid or 0, 0.0), 3)) if command.running else command


def _output(spool: Spool) -> Output:
    tail = base64.b64encode(spool.tail(OUTPUT_TAIL)).decode()
    return Output(tail, spool.total, spool.total > OUTPUT_TAIL, spool.dropped, "" if spool.total and not spool.kept else str(spool.path))
