"""One child process as a thing with an owner: started outside the event loop, awaited and killed through its pidfd (a pid may be reused).

It has a session of its own and so outlives the daemon; it is ended by `kill` only.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import trio

from node.errors import VmError

KILL_DEADLINE = 30.0  # seconds; a process of many GiB in uninterruptible I/O takes its time


class Process:
    """`pid`, and `exit_code` once `wait` has returned (negative: the signal that ended it)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self._pidfd = os.pidfd_open(pid)

    @classmethod
    def adopt(cls, pid: int, started: int) -> Process:
        """The process that an earlier daemon started and that began at `started` (`start_ticks`). VmError when it is gone."""
        try:
            process = cls(pid)  # first, so that it is this process of which the next line speaks
        except OSError as error:
            raise VmError(f"the process {pid} is gone", cause=str(error)) from error
        if start_ticks(pid) != started:
            os.close(process._pidfd)
            raise VmError(f"the process {pid} is gone", cause="its number belongs to another one now")
        return process

    @classmethod
    async def spawn(cls, argv: Sequence[str], *, pass_fds: Sequence[int], errors: int) -> Process:
        """Starts `argv` with no environment and no input, its output going to `errors`. The caller closes its descriptors."""

        def start() -> Process:  # in a thread: vfork holds its caller until the exec, 1-3 ms
            child = subprocess.Popen(
                argv,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            child.returncode = 0  # the pidfd's from here: Popen would wait for it when it is collected
            return cls(child.pid)

        try:
            return await trio.to_thread.run_sync(start)
        except OSError as error:
            raise VmError(f"{argv[0]} does not start", cause=str(error), remedy="Install QEMU >= 9: `boxctl doctor` says how.") from error

    async def wait(self) -> int:
        """The exit code, once it has ended. One task waits: the owner's."""
        if self.exit_code is None:
            await trio.lowlevel.wait_readable(self._pidfd)
            self.exit_code = self._reap()
            os.close(self._pidfd)
        return self.exit_code

    def _reap(self) -> int:
        try:
            _, status = os.waitpid(self.pid, 0)  # it has ended: does not block
        except ChildProcessError:
            return -signal.SIGKILL  # adopted, so another's child: how it ended is not told
        return os.waitstatus_to_exitcode(status)

    def send_kill(self) -> None:
        """SIGKILL; nothing happens if it has ended."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since the host's boot (proc(5)): with the pid it names one process for ever. None: gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def tail(path: Path, limit: int = 1000) -> str:
    """The last `limit` bytes of a log, as text; empty if there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit).decode(errors="replace").strip()
    return ""
